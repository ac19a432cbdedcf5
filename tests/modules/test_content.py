import pytest
import torch
from torch.nn.functional import silu

from recsys import protos as pb
from recsys.modules.content import ContentEncoder
from recsys.modules.gated_mlp import RowContext
from recsys.ops import SequenceLayout
from tests.modules.pipelines import RANKER, pipeline_of


def encoder():
    pipeline = pipeline_of(RANKER)
    module = ContentEncoder(pipeline.model.ranker.preprocessor.contextual, pipeline=pipeline)
    torch.nn.init.normal_(module.missing["uih_price"])
    return module


def inputs(prefix, count):
    return {
        f"{prefix}item_id": torch.randn(count, 8),
        f"{prefix}tags": torch.randn(count, 4),
        f"{prefix}price": torch.randn(count, 1),
    }


def test_candidates_are_their_features_in_the_configs_order_through_the_mlp():
    module, given = encoder(), inputs("candidate_", 3)
    first, last = module.project[0], module.project[-1]
    for row in range(3):
        joined = torch.cat([given[f"candidate_{name}"][row] for name in ("item_id", "tags", "price")])
        expected = last.weight @ silu(first.weight @ joined + first.bias) + last.bias
        torch.testing.assert_close(module(pb.CANDIDATE, given, 3)[row], expected)


def test_an_event_with_a_candidates_features_differs_only_by_what_events_lack():
    module, given = encoder(), inputs("candidate_", 3)
    given["candidate_price"] = module.missing["uih_price"].expand(3, 1)
    as_events = {name.replace("candidate_", "uih_"): value for name, value in given.items()}
    del as_events["uih_price"]
    torch.testing.assert_close(module(pb.HISTORY, as_events, 3), module(pb.CANDIDATE, given, 3))


def test_an_item_needs_features():
    pipeline = pb.Pipeline()
    pipeline.features.add(name="age", sides=[pb.USER]).numeric.normalize.SetInParent()
    pipeline.model.embedding_dim = 8
    with pytest.raises(ValueError, match="no feature has the side HISTORY or CANDIDATE"):
        ContentEncoder(pb.ContextualPreprocessor(), pipeline=pipeline)


def encoder_of(**choice):
    """Items are 13 wide: 8 of item_id, 4 of tags, 1 of price."""
    pipeline = pipeline_of(RANKER)
    config = pb.ContextualPreprocessor(**choice)
    return pipeline, config


def test_slice_keeps_the_first_columns():
    pipeline, config = encoder_of(content_slice=pb.SliceContent())
    given = inputs("candidate_", 3)
    actual = ContentEncoder(config, pipeline=pipeline)(pb.CANDIDATE, given, 3)
    assert torch.equal(actual, given["candidate_item_id"])
    pipeline.model.embedding_dim = 14
    with pytest.raises(ValueError, match="content_slice: an item's features are 13 wide"):
        ContentEncoder(config, pipeline=pipeline)


def test_pad_fills_up_with_one_learned_vector():
    pipeline, config = encoder_of(content_pad=pb.PadContent())
    with pytest.raises(ValueError, match="content_pad: an item's features are 13 wide"):
        ContentEncoder(config, pipeline=pipeline)
    pipeline.model.embedding_dim = 16
    module = ContentEncoder(config, pipeline=pipeline)
    torch.nn.init.normal_(module.project.filling)
    torch.nn.init.normal_(module.missing["uih_price"])
    given = inputs("uih_", 3)
    actual = module(pb.HISTORY, given, 3)
    for row in range(3):
        parts = [given["uih_item_id"][row], given["uih_tags"][row], module.missing["uih_price"]]
        assert torch.equal(actual[row], torch.cat([*parts, module.project.filling]))
    assert module(pb.CANDIDATE, inputs("candidate_", 0), 0).shape == (0, 16)


@pytest.mark.parametrize("choice", ["content_slice", "content_pad"])
def test_items_as_wide_as_tokens_stay_as_they_are(choice):
    pipeline, config = encoder_of(**{choice: {}})
    pipeline.model.embedding_dim = 13
    module, given = ContentEncoder(config, pipeline=pipeline), inputs("candidate_", 2)
    assert list(module.project.parameters()) == []
    joined = torch.cat([given[f"candidate_{name}"] for name in ("item_id", "tags", "price")], dim=1)
    assert torch.equal(module(pb.CANDIDATE, given, 2), joined)


def test_a_row_sees_items_through_its_own_weights():
    pipeline, config = encoder_of(content_contextualized=pb.ContextualizedMlp(rank=2))
    module, given = ContentEncoder(config, pipeline=pipeline), inputs("candidate_", 4)
    # The same two items in two rows with other users, 5 wide: 4 of gender, 1 of age.
    given = {name: torch.cat([value[:2], value[:2]]) for name, value in given.items()}
    rows = RowContext(torch.randn(2, 5), SequenceLayout(torch.tensor([2, 2])))
    actual = module(pb.CANDIDATE, given, 4, rows)
    joined = torch.cat([given[f"candidate_{name}"] for name in ("item_id", "tags", "price")], dim=1)
    torch.testing.assert_close(actual, module.project(joined, rows))
    assert (actual[:2] - actual[2:]).abs().min() > 0
