"""The trie against sets of prefixes, and losses and scores of the decoder against loops in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules.code_decoder import CodeDecoder, CodeEmbedding
from recsys.modules.code_trie import CodeTrie

SIZES, WIDTH = (5, 4, 6, 2), 8


def some_codes(seed=0, count=60):
    everything = np.stack(np.meshgrid(*map(np.arange, SIZES), indexing="ij"), -1).reshape(-1, len(SIZES))
    return np.random.default_rng(seed).permutation(everything)[:count]


def decoder(layers=2, heads=2):
    torch.manual_seed(1)
    config = pb.CodeDecoder(num_layers=layers, num_heads=heads, ff_dim=12)
    made = CodeDecoder(config, SIZES, CodeEmbedding(SIZES, WIDTH, 1.0), WIDTH).double().eval()
    torch.nn.init.normal_(made.positions)
    return made


def log_probabilities(made, state, codes):
    """Of each code given those before it, by a whole sequence with a mask, in torch's own attention."""
    tokens = [state, *(made.embed.table.weight[made.embed.starts[i] + c] for i, c in enumerate(codes[:-1]))]
    x = torch.stack(tokens) + made.positions
    for block in made.blocks:
        q, k, v = block.query_key_value(block.norm(x)).chunk(3, -1)
        q, k, v = (y.view(len(x), block.heads, -1).transpose(0, 1) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(len(x), -1)
        x = x + block.output(mixed)
        x = x + block.feed_forward(x)
    x = made.norm(x)
    return torch.stack([made.logits[i](x[i]).log_softmax(0)[code] for i, code in enumerate(codes)])


def test_the_trie_has_the_prefixes_of_all_codes_in_order():
    codes = some_codes()
    trie = CodeTrie(codes, SIZES)
    paths = [()]
    for level in range(len(SIZES)):
        first, parent, token = trie.first(level), trie.parent(level), trie.token(level)
        assert len(first) == len(paths) + 1
        edges = zip(parent.tolist(), token.tolist(), strict=True)
        for node in range(len(paths)):
            assert (parent[first[node] : first[node + 1]] == node).all()
        paths = [(*paths[node], code) for node, code in edges]
        assert paths == sorted({tuple(code[: level + 1]) for code in codes.tolist()})
    assert [tuple(codes[item]) for item in trie.item.tolist()] == paths


def test_a_trie_refuses_codes_that_two_items_share_or_that_are_too_large():
    with pytest.raises(ValueError, match="same codes"):
        CodeTrie(np.array([[0, 1], [2, 0], [0, 1]]), (3, 3))
    with pytest.raises(ValueError, match="less 1"):
        CodeTrie(np.array([[0, 3]]), (3, 3))


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (2, 2)])
def test_losses_and_scores_are_those_of_a_loop_in_float64(layers, heads):
    made, codes = decoder(layers, heads), some_codes(count=40)
    states = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack(
            [
                torch.stack([log_probabilities(made, state, code) for code in codes.tolist()])
                for state in states
            ]
        )
        scores = made.scores(states, CodeTrie(codes, SIZES))
        losses = made(states.repeat_interleave(40, 0), torch.from_numpy(codes).repeat(3, 1))
    torch.testing.assert_close(scores.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.double(), -expected.mean(2).flatten(), rtol=1e-5, atol=1e-5)


def test_the_probabilities_of_all_possible_codes_add_up_to_one():
    codes = some_codes(count=int(np.prod(SIZES)))
    with torch.no_grad():
        scores = decoder().scores(torch.randn(2, WIDTH, dtype=torch.float64), CodeTrie(codes, SIZES))
    torch.testing.assert_close(scores.exp().sum(1), torch.ones(2), rtol=1e-5, atol=1e-5)


def test_an_item_is_the_sum_of_its_codes_and_an_unknown_item_has_rows_of_its_own():
    embed = CodeEmbedding(SIZES, WIDTH, 1.0)
    weight = embed.table.weight
    found = embed(torch.tensor([[1, 2, 5, 0], [-1, -1, -1, -1]]))
    torch.testing.assert_close(found[0], weight[1] + weight[5 + 2] + weight[9 + 5] + weight[15])
    torch.testing.assert_close(found[1], 4 * weight[17])
