"""Losses and scores of ids against the softmax of cosines in float64."""

import numpy as np
import torch

from recsys import protos as pb
from recsys.modules.item_ids import ItemIds


def test_losses_and_scores_are_those_of_a_softmax_over_cosines():
    torch.manual_seed(0)
    ids = ItemIds(pb.ItemIds(temperature=0.3), 6, 8, 1.0)
    states, tokens = torch.randn(4, 8), torch.randn(6, 8)
    s, t = (rows.double().numpy() for rows in (states, tokens))
    cosines = s @ t.T / np.linalg.norm(s, axis=1)[:, None] / np.linalg.norm(t, axis=1)
    log_p = cosines / 0.3 - np.log(np.exp(cosines / 0.3).sum(1, keepdims=True))
    scores = ids.scores(states, tokens)
    np.testing.assert_allclose(scores.numpy(), log_p, atol=1e-5)
    targets = torch.tensor([3, 0, 6, 1])
    losses = ids(states, tokens, targets)
    np.testing.assert_allclose(
        losses.detach().numpy(), [-log_p[0, 2], 0, -log_p[2, 5], -log_p[3, 0]], atol=1e-5
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ids.scores(states, tokens), scores)
