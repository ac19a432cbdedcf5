import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.preprocessors import UihPreprocessor
from tests.modules.pipelines import RETRIEVER, batch_of, pipeline_of, random_rows

SIZES = [(3, 1), (0, 1), (5, 1), (1, 1)]


def build(pipeline):
    module = UihPreprocessor(pipeline.model.retriever.preprocessor.uih, pipeline=pipeline)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def test_equals_the_description_event_by_event():
    pipeline = pipeline_of(RETRIEVER)
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    items = torch.randn(9, 8)
    prepared = module({"uih_item_id": items}, batch_of(pipeline, rows))
    tokens, times, n = [], [], 0
    for row in rows:
        for i, action in enumerate(row.uih_actions):
            value = items[n] + (action % 2) * module.action.weight[0]
            tokens.append(value * math.sqrt(8) + module.positional.position.weight[i])
            times.append((row.uih_timestamps[i], [*row.uih_timestamps, row.request_time][i + 1]))
            n += 1
    sequence = prepared.sequence
    torch.testing.assert_close(sequence.values, torch.stack(tokens))
    assert list(zip(sequence.timestamps.tolist(), sequence.next_timestamps.tolist(), strict=True)) == times
    assert prepared.candidates is None


def test_more_features_are_joined_and_projected():
    more = 'features { name: "stars" sides: HISTORY numeric { normalize {} } }'
    pipeline = pipeline_of(RETRIEVER, more)
    pipeline.model.retriever.preprocessor.uih.ClearField("action")
    pipeline.model.retriever.preprocessor.uih.ClearField("positional")
    rows, module = random_rows(pipeline, SIZES), build(pipeline)
    items = torch.randn(9, 8)
    stars = torch.tensor(sum((row.values["uih_stars"] for row in rows), []))
    expected = torch.cat([items, stars[:, None]], dim=1) @ module.project.weight.T + module.project.bias
    inputs = {"uih_item_id": items, "uih_stars": stars[:, None]}
    actual = module(inputs, batch_of(pipeline, rows)).sequence.values
    torch.testing.assert_close(actual, expected)


def test_a_history_needs_features():
    pipeline = pb.Pipeline()
    with pytest.raises(ValueError, match="no feature has the side HISTORY"):
        UihPreprocessor(pb.UihPreprocessor(), pipeline=pipeline)
