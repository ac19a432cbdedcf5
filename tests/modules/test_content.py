import pytest
import torch
from torch.nn.functional import silu

from recsys import protos as pb
from recsys.modules.content import ContentEncoder
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
