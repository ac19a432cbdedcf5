"""Selected and joined rows are those that a reader makes of the same rows in batches of another size."""

from dataclasses import fields

import numpy as np
import pytest

from recsys import config
from recsys import protos as pb
from recsys.data.convert.batch_rows import BatchRows
from recsys.data.convert.packer import BatchArrays
from recsys.data.loader import Loader
from recsys.models import layout_rule
from tests.integration.runs import CONFIG

ONE_STACK = "num_heads: 2 qk_dim: 8"
FORMS = {
    "ranker": ("model.ranker.tasks[0].weight_column=candidate_watch_time",),
    "channels": (
        "model.ranker.preprocessor.contextual.channels="
        '[{name: "clicks" bits: [0]}, {name: "long" bits: [1, 6]}]',
        f'model.ranker.mixer={{mixture {{stacks: {{channel: "clicks" hstu {{{ONE_STACK}}}}} '
        f'stacks: {{channel: "long" hstu {{{ONE_STACK}}}}}}}}}',
    ),
}


def reader(form: str, batch_size: int):
    overrides = [*FORMS[form], "data.num_lanes=1", f"data.batch_size={batch_size}", "data.num_workers=0"]
    pipeline = config.prepare(CONFIG, overrides).pipeline
    return pipeline, Loader.open(pipeline, "train", layout_rule(pipeline), shuffle=True)._reader


def assert_same(actual: BatchArrays, expected: BatchArrays) -> None:
    for item in fields(BatchArrays):
        values = getattr(actual, item.name), getattr(expected, item.name)
        if isinstance(values[0], dict) and item.name != "counts":
            assert values[0].keys() == values[1].keys()
            for key in values[0]:
                np.testing.assert_array_equal(values[0][key], values[1][key], f"{item.name} {key}")
        else:
            np.testing.assert_array_equal(*values, item.name)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_batches_of_another_size(form):
    pipeline, whole = reader(form, 16)
    _, single = reader(form, 1)
    rows = BatchRows(pipeline, "train")
    arrays = whole.read(0, 1)
    assert sum(map(len, arrays.channel_events.values())) > 0 or form != "channels"
    assert_same(rows.join([single.read(0, 16 + row) for row in range(16)]), arrays)
    chosen = np.array([9, 2, 3, 15])
    expected = rows.join([single.read(0, 16 + row) for row in chosen])
    expected.counts.clear()
    assert_same(rows.select(arrays, chosen), expected)
    nothing = rows.select(arrays, chosen[:0])
    assert_same(rows.join([nothing, rows.select(arrays, chosen)]), expected)


def test_several_numbers_of_an_element_stay_together(monkeypatch):
    """Kinds of features of other packages may have them. Numbers tell the candidate that they belong to."""
    pipeline, whole = reader("ranker", 16)
    rows, arrays = BatchRows(pipeline, "train"), whole.read(0, 1)
    monkeypatch.setitem(rows._widths, "pair", 2)
    monkeypatch.setitem(rows._sides["numbers"], "pair", pb.CANDIDATE)
    arrays.numbers["pair"] = np.repeat(np.arange(arrays.num_candidates.sum()), 2)
    chosen = np.array([9, 2, 15])
    owner = np.repeat(np.arange(16), arrays.num_candidates)
    expected = np.concatenate([np.repeat(np.flatnonzero(owner == row), 2) for row in chosen])
    assert len(expected) >= 6
    np.testing.assert_array_equal(rows.select(arrays, chosen).numbers["pair"], expected)
