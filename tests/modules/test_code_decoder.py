"""The trie against sets of prefixes, and losses and scores of the decoder against loops in float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from recsys import protos as pb
from recsys.modules import better_items as better_items_module
from recsys.modules.beam_search import SeenItems, beam_search
from recsys.modules.better_items import better_items
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
    """log P of each code given those before it, by torch's attention over a whole sequence with a mask."""
    tokens = [state, *(made.embed.table.weight[made.embed.starts[i] + c] for i, c in enumerate(codes[:-1]))]
    x = torch.stack(tokens) + made.positions[: len(tokens)]
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


def test_a_trie_of_some_items_is_the_trie_of_their_codes_alone():
    codes = some_codes()
    items = np.array([2, 3, 11, 30, 59])
    part, alone = CodeTrie(codes, SIZES, items), CodeTrie(codes[items], SIZES)
    for name, buffer in alone.named_buffers():
        if name not in ("item", "leaf"):
            assert torch.equal(part.get_buffer(name), buffer), name
    assert part.counts == alone.counts and part.most_children == alone.most_children
    assert part.item.tolist() == items[alone.item].tolist()
    assert part.leaf[items].tolist() == alone.leaf.tolist()
    assert (np.delete(part.leaf.numpy(), items) == 5).all() and len(part.leaf) == len(codes)


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
    vectors = embed(torch.tensor([[1, 2, 5, 0], [-1, -1, -1, -1]]))
    torch.testing.assert_close(vectors[0], weight[1] + weight[5 + 2] + weight[9 + 5] + weight[15])
    torch.testing.assert_close(vectors[1], 4 * weight[17])


def found_by_sorting(scores, seen, width):
    """The best items of each row that it has not seen, from scores of all items in float64."""
    rows = []
    for row, of_items in enumerate(scores.tolist()):
        left = [item for item in range(len(of_items)) if item not in seen[row]]
        rows.append(sorted(left, key=lambda item, of_items=of_items: -of_items[item])[:width])
    return rows


def some_seen(seen):
    pairs = [(row, item) for row, items in enumerate(seen) for item in items]
    pairs = torch.tensor(pairs[::-1], dtype=torch.int64).reshape(-1, 2)
    return SeenItems(pairs[:, 0], pairs[:, 1])


def exact(made, states, codes):
    return torch.stack(
        [
            torch.stack([log_probabilities(made, state, code).sum() for code in codes.tolist()])
            for state in states
        ]
    )


@pytest.mark.parametrize("width", [60, 500])
def test_a_beam_as_wide_as_the_catalogue_finds_what_sorting_all_scores_finds(width):
    made, codes = decoder(), some_codes()
    seen = [[], [3, 3, 17, -1, 40], list(range(50))]
    states = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        scores = exact(made, states, codes)
        best = beam_search(made, CodeTrie(codes, SIZES), states, width, some_seen(seen))
    assert best.items.shape == (3, 60)
    for row, items in enumerate(found_by_sorting(scores, seen, 60)):
        padding = [-1] * (60 - len(items))
        assert best.items[row].tolist() == items + padding
        assert (best.scores[row, len(items) :] == -torch.inf).all()
        expected = scores[row, items]
        torch.testing.assert_close(best.scores[row, : len(items)].double(), expected, rtol=1e-5, atol=1e-5)


def prefixes_in_a_loop(made, state, codes, seen, width):
    """Beam search over sets of prefixes, each scored anew by the whole sequence."""
    beams = [()]
    left = [code for item, code in enumerate(map(tuple, codes.tolist())) if item not in seen]
    for level in range(len(SIZES)):
        longer = sorted({code[: level + 1] for code in left if code[:level] in beams})
        scores = {prefix: log_probabilities(made, state, prefix).sum().item() for prefix in longer}
        beams = sorted(longer, key=lambda prefix: -scores[prefix])[:width]
    return beams


@pytest.mark.parametrize("width", [1, 4, 9])
def test_a_narrow_beam_keeps_the_best_prefixes_with_an_item_left(width):
    made, codes = decoder(), some_codes()
    seen = [[], [item for item, code in enumerate(codes) if code[0] != 2 or code[1] == 1][1:], [5, 5]]
    states = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        best = beam_search(made, CodeTrie(codes, SIZES), states, width, some_seen(seen))
        for row, state in enumerate(states):
            expected = prefixes_in_a_loop(made, state, codes, seen[row], width)
            items = [item for item in best.items[row].tolist() if item >= 0]
            assert [tuple(codes[item]) for item in items] == expected
            assert len(items) == min(width, 60 - len(set(seen[row])))


def test_of_equal_scores_the_first_in_the_order_of_codes_is_found():
    made, codes = decoder(), some_codes()
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        best = beam_search(made, CodeTrie(codes, SIZES), torch.zeros(1, WIDTH).double(), 7, some_seen([[]]))
    assert [tuple(codes[item]) for item in best.items[0]] == sorted(map(tuple, codes.tolist()))[:7]


@pytest.mark.parametrize(("at_a_time", "most_children"), [(3, 2**21), (2048, 2**21), (2048, 12), (2048, 1)])
def test_items_that_score_no_less_than_a_target_are_those_of_all_scores(
    monkeypatch, at_a_time, most_children
):
    monkeypatch.setitem(better_items_module.AT_A_TIME, "cpu", at_a_time)
    monkeypatch.setattr(better_items_module, "MOST_CHILDREN", most_children)
    widths, logits = [], better_items_module._Search._logits

    def seen(search, level, paths):
        widths.append(len(paths.node))
        return logits(search, level, paths)

    monkeypatch.setattr(better_items_module._Search, "_logits", seen)
    made, codes = decoder(), some_codes()
    states, targets = torch.randn(9, WIDTH, dtype=torch.float64), torch.arange(9) * 6
    with torch.no_grad():
        scores = exact(made, states, codes)
        pairs = better_items(made, CodeTrie(codes, SIZES), states, targets)
    expected = {
        (row, item) for row, of in enumerate(scores) for item in range(60) if of[item] >= of[targets[row]]
    }
    assert set(zip(pairs.target.tolist(), pairs.item.tolist(), strict=True)) == expected
    assert len(pairs.item) == len(expected)
    # The trie has more than one child a node on each level, so few children mean fewer paths.
    assert max(widths) <= min(at_a_time, most_children)


def test_a_target_is_found_however_its_score_is_rounded(monkeypatch):
    """With a bound above all scores nothing but the targets' own paths is continued."""
    monkeypatch.setattr(better_items_module, "MARGIN", -1e9)
    made, trie, targets = decoder(), CodeTrie(some_codes(), SIZES), torch.tensor([7, 7, 59])
    with torch.no_grad():
        pairs = better_items(made, trie, torch.randn(3, WIDTH, dtype=torch.float64), targets)
        nothing = better_items(made, trie, torch.zeros(0, WIDTH, dtype=torch.float64), targets[:0])
    assert pairs.target.tolist() == [0, 1, 2] and pairs.item.tolist() == [7, 7, 59]
    assert len(nothing.item) == 0


@pytest.mark.gpu
def test_a_beam_on_cuda_finds_what_it_finds_on_a_cpu_and_is_recorded_in_a_graph():
    made, codes = decoder().float(), some_codes()
    trie, seen = CodeTrie(codes, SIZES), some_seen([[], [3, 3, 17, -1, 40], list(range(50))])
    states = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        expected = [beam_search(made, trie, state, 9, seen) for state in states]
        made, trie, seen = made.cuda(), trie.cuda(), SeenItems(*(tensor.cuda() for tensor in seen))
        given = states[0].cuda()
        beam_search(made, trie, given, 9, seen)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            best = beam_search(made, trie, given, 9, seen)
        for state, on_host in zip(states, expected, strict=True):
            given.copy_(state)
            graph.replay()
            assert torch.equal(best.items.cpu(), on_host.items)
            torch.testing.assert_close(best.scores.cpu(), on_host.scores)
