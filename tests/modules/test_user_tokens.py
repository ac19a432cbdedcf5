"""Contextual tokens against loops over rows and features."""

import pytest
import torch
from torch.nn.functional import silu

from recsys import protos as pb
from recsys.config import features
from recsys.modules.user_tokens import FeatureTokens, JoinedTokens
from tests.modules.pipelines import RANKER, pipeline_of

COLUMNS = features.columns(pipeline_of(RANKER), pb.USER)


def inputs():
    return {"gender": torch.randn(3, 4), "age": torch.randn(3, 1)}


def test_a_token_for_each_feature():
    module, given = FeatureTokens(COLUMNS, embedding_dim=8), inputs()
    expected = []
    for row in range(3):
        for name in ("gender", "age"):
            layer = module.project[f"{name}_token"]
            expected.append(layer.weight @ given[name][row] + layer.bias)
    torch.testing.assert_close(module(given), torch.stack(expected))


def test_joined_features_are_cut_into_tokens():
    config = pb.JoinedContextualTokens(num_tokens=3, mlp=pb.Mlp(hidden=[6]))
    module, given = JoinedTokens(config, COLUMNS, embedding_dim=8), inputs()
    first, _, last = module.project
    expected = []
    for row in range(3):
        joined = torch.cat([given["gender"][row], given["age"][row]])
        wide = last.weight @ silu(first.weight @ joined + first.bias) + last.bias
        expected += [wide[:8], wide[8:16], wide[16:]]
    torch.testing.assert_close(module(given), torch.stack(expected))


def test_nothing_to_join():
    with pytest.raises(ValueError, match="no feature has the side USER"):
        JoinedTokens(pb.JoinedContextualTokens(), [], embedding_dim=8)
