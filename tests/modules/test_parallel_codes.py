"""Losses and scores of parallel heads against a loop over heads and values in float64."""

import numpy as np
import pytest
import torch

from recsys import protos as pb
from recsys.modules.code_decoder import CodeEmbedding
from recsys.modules.parallel_codes import ParallelCodes

SIZES, WIDTH, TEMPERATURE = (5, 4, 6), 8, 0.3


@pytest.fixture
def heads():
    torch.manual_seed(0)
    embed = CodeEmbedding(SIZES, WIDTH, 1.0, mean=True)
    made = ParallelCodes(pb.ParallelCodes(temperature=TEMPERATURE), SIZES, embed, WIDTH).double().eval()
    torch.nn.init.normal_(made.weight)
    torch.nn.init.normal_(made.bias)
    return made


def log_probability(heads, state, code, value):
    """Cosine of head and value over the temperature, less the log of the sum over all values."""
    table, state = heads.embed.table.weight.detach().numpy(), state.numpy()
    linear = state @ heads.weight[code].detach().numpy() + heads.bias[code, 0].detach().numpy()
    head = state + linear / (1 + np.exp(-linear))
    start = sum(SIZES[:code])
    cosines = [
        head @ table[start + v] / np.linalg.norm(head) / np.linalg.norm(table[start + v])
        for v in range(SIZES[code])
    ]
    logits = np.array(cosines) / TEMPERATURE
    return logits[value] - np.log(np.exp(logits).sum())


def test_scores_are_sums_over_codes_and_losses_their_means(heads):
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, SIZES, (7, 3)))
    states = torch.randn(2, WIDTH, dtype=torch.float64)
    expected = torch.tensor(
        [
            [sum(log_probability(heads, s, i, v) for i, v in enumerate(c)) for c in codes.tolist()]
            for s in states
        ]
    )
    with torch.no_grad():
        scores = heads.scores(states, codes)
        losses = heads(states.repeat_interleave(7, 0), codes.repeat(2, 1))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.double(), -expected.flatten() / 3, rtol=1e-5, atol=1e-5)


def test_heads_begin_with_the_state_itself():
    embed = CodeEmbedding(SIZES, WIDTH, 1.0, mean=True)
    made = ParallelCodes(pb.ParallelCodes(temperature=0.5), SIZES, embed, WIDTH)
    state, table = torch.randn(1, WIDTH), embed.table.weight[5:9]
    with torch.no_grad():
        cosines = torch.nn.functional.cosine_similarity(state, table)
        torch.testing.assert_close(made.logits(state)[1][0], cosines / 0.5)


def test_an_item_is_the_mean_of_its_codes():
    embed = CodeEmbedding(SIZES, WIDTH, 1.0, mean=True)
    weight = embed.table.weight
    torch.testing.assert_close(
        embed(torch.tensor([[1, 2, 5]]))[0], (weight[1] + weight[5 + 2] + weight[9 + 5]) / 3
    )
