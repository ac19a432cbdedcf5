"""Encoder and decoder of codes against plain PyTorch in float64, history by history and item by item."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules.beam_search import SeenItems, beam_search
from recsys.modules.code_decoder import CodeDecoder, CodeEmbedding
from recsys.modules.code_encoder import CodeEncoder, prefixes_of
from recsys.modules.code_trie import CodeTrie
from recsys.ops import SequenceLayout
from tests.modules.test_code_decoder import SIZES, some_codes

WIDTH, HEADS, HEAD, MOST = 8, 3, 4, 3
LENGTHS = [3, 0, 5, 1]


def made(config=pb.CodeEncoder, **more):
    return config(num_layers=2, num_heads=HEADS, head_dim=HEAD, ff_dim=12, **more)


def parts():
    """An encoder and a decoder whose weights are all random, and a history of LENGTHS."""
    torch.manual_seed(2)
    embed = CodeEmbedding(SIZES, WIDTH, 1.0)
    encoder = CodeEncoder(made(), len(SIZES), WIDTH, MOST, 1.0).double().eval()
    decoder = CodeDecoder(made(pb.CodeDecoder), SIZES, embed, WIDTH, has_memory=True).double().eval()
    for parameter in (*encoder.parameters(), *decoder.parameters()):
        torch.nn.init.normal_(parameter, std=0.4)
    history = torch.from_numpy(some_codes(seed=5, count=sum(LENGTHS)))
    history[4] = -1  # an unknown item
    return encoder, decoder, history


def norm(weights, name, x):
    return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"])


def linear(weights, name, x):
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def attention(query, key, value, causal=False):
    """Softmax attention of [n, heads * HEAD] to [m, heads * HEAD], head by head."""
    heads = []
    for at in range(0, HEADS * HEAD, HEAD):
        q, k, v = (tensor[:, at : at + HEAD] for tensor in (query, key, value))
        scores = q @ k.T / math.sqrt(HEAD)
        if causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        heads.append(scores.softmax(1) @ v)
    return torch.cat(heads, 1)


def feed_forward(weights, name, x):
    return linear(weights, f"{name}.3", F.gelu(linear(weights, f"{name}.1", norm(weights, f"{name}.0", x))))


def encoded(encoder, table, starts, codes):
    """The tokens of one history, [1 + levels n, WIDTH], from the codes of its items, oldest first."""
    weights, tokens = encoder.state_dict(), [encoder.start[0]]
    for number, item in enumerate(codes.tolist()):
        age = min(len(codes) - 1 - number, MOST - 1)
        for level, code in enumerate(item):
            row = starts[-1] if code < 0 else starts[level] + code
            tokens.append(table[row] + weights["positions.weight"][age])
    x = torch.stack(tokens)
    for number in range(2):
        block = f"blocks.{number}"
        q, k, v = linear(weights, f"{block}.query_key_value", norm(weights, f"{block}.norm", x)).chunk(3, 1)
        x = x + linear(weights, f"{block}.output", attention(q, k, v))
        x = x + feed_forward(weights, f"{block}.feed_forward", x)
    return norm(weights, "norm", x)


def log_probabilities(decoder, memory, item):
    """log P of each code of an item, given those before it and an encoded history."""
    weights, starts = decoder.state_dict(), decoder.embed.starts
    table = weights["embed.table.weight"]
    tokens = [torch.zeros(WIDTH).double(), *(table[starts[i] + c] for i, c in enumerate(item[:-1]))]
    x = torch.stack(tokens) + weights["positions"]
    for number in range(2):
        block = f"blocks.{number}"
        q, k, v = linear(weights, f"{block}.query_key_value", norm(weights, f"{block}.norm", x)).chunk(3, 1)
        x = x + linear(weights, f"{block}.output", attention(q, k, v, causal=True))
        query = linear(weights, f"{block}.read.query", norm(weights, f"{block}.read.norm", x))
        keys, values = linear(weights, f"{block}.read.key_value", memory).chunk(2, 1)
        x = x + linear(weights, f"{block}.read.output", attention(query, keys, values))
        x = x + feed_forward(weights, f"{block}.feed_forward", x)
    x = norm(weights, "norm", x)
    return torch.stack([linear(weights, f"logits.{i}", x[i]).log_softmax(0)[c] for i, c in enumerate(item)])


def test_encoder_and_decoder_are_those_of_loops_over_histories_and_items():
    encoder, decoder, history = parts()
    layout, codes = SequenceLayout(torch.tensor(LENGTHS)), some_codes(count=30)
    table, starts = decoder.embed.table.weight, decoder.embed.starts
    with torch.no_grad():
        memories = [encoded(encoder, table, starts, part) for part in history.split(LENGTHS)]
        expected = torch.stack(
            [torch.stack([log_probabilities(decoder, m, item) for item in codes.tolist()]) for m in memories]
        )
        histories = encoder(decoder.embed.each(history), layout)
        scores = decoder.scores(histories, CodeTrie(codes, SIZES))
        targets = [7, 2, 29, 11]
        losses = decoder(histories, torch.from_numpy(codes[targets]))
        nothing = torch.zeros(0, dtype=torch.int64)
        best = beam_search(decoder, CodeTrie(codes, SIZES), histories, 30, SeenItems(nothing, nothing))
    with pytest.raises(ValueError, match="only histories can be widened"):
        histories.layout.widen(2)
    torch.testing.assert_close(histories.values, torch.cat(memories))
    torch.testing.assert_close(scores.double(), expected.sum(2), rtol=1e-5, atol=1e-5)
    of_targets = torch.stack([-expected[row, item].mean() for row, item in enumerate(targets)])
    torch.testing.assert_close(losses.double(), of_targets, rtol=1e-5, atol=1e-5)
    assert torch.equal(best.items, expected.sum(2).argsort(1, descending=True))
    torch.testing.assert_close(histories.part(1, 3).values, torch.cat(memories[1:3]))


def test_all_prefixes_are_those_of_a_loop_and_a_draw_takes_some_of_each_row():
    layout = SequenceLayout(torch.tensor([4, 0, 1, 6, 2]))
    first = layout.offsets.tolist()
    expected = [
        (begin, end) for begin, stop in zip(first, first[1:], strict=False) for end in range(begin, stop - 1)
    ]

    def cut(most, draw):
        prefixes = prefixes_of(layout, most, draw=draw)
        parts = prefixes.events.split(prefixes.layout.lengths.tolist())
        assert prefixes.last.tolist() == [part[-1].item() for part in parts]
        return [(part[0].item(), part[-1].item()) for part in parts if (part.diff() == 1).all()]

    assert cut(None, True) == expected
    assert cut(2, False) == [(0, 1), (0, 2), (5, 8), (5, 9), (11, 11)]
    torch.manual_seed(0)
    drawn = [cut(2, True) for _ in range(200)]
    counts = {prefix: sum(prefix in draw for draw in drawn) for prefix in expected}
    for draw in drawn:
        assert draw == sorted(set(draw)) and [begin for begin, _ in draw] == [0, 0, 5, 5, 11]
    for (begin, _), count in counts.items():
        share = {0: 2 / 3, 5: 2 / 5, 11: 1}[begin]
        assert abs(count / 200 - share) <= 4 * np.sqrt(share * (1 - share) / 200)
    torch.manual_seed(0)
    assert cut(2, True) == drawn[0]


def test_the_cost_is_that_of_all_prefixes():
    encoder, decoder, _ = parts()
    layout = SequenceLayout(torch.tensor([4, 0, 1, 3]))
    lengths = [len(SIZES) * events + 1 for events in (1, 2, 3, 1, 2)]
    weights = sum(p.numel() for n, p in encoder.blocks.named_parameters() if p.dim() == 2)
    cost = encoder.cost(layout)
    pairs = sum(length**2 for length in lengths)
    flops = 2 * sum(lengths) * weights + 2 * 2 * 2 * pairs * HEADS * HEAD
    assert cost == (5, sum(lengths), flops)
    assert decoder.flops(5, sum(lengths)) - decoder.flops(5) == 2 * 2 * sum(lengths) * (
        2 * WIDTH * HEADS * HEAD + 2 * len(SIZES) * HEADS * HEAD
    )
