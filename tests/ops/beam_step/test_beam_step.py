"""A step of a beam search, by the kernels and in plain PyTorch, against a loop over all items in float64."""

import math

import numpy as np
import pytest
import torch

from recsys.modules import beam_search
from recsys.modules.beam_search import SeenItems
from recsys.modules.code_trie import CodeTrie
from recsys.ops.beam_step import Beams, beam_step
from tests.ops.harness import Runner, interpreter_test, runners
from tests.tools.interpreter import between_poison

SIZES = (5, 4, 21)

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))

test_in_the_interpreter = interpreter_test(__file__)


def some_codes(count):
    order = np.random.default_rng(0).permutation(math.prod(SIZES))[:count]
    return np.stack(np.unravel_index(order, SIZES), 1)


def some_beams(trie, level, rows, width):
    """Different nodes of a depth in each row; the last beam of a row is none."""
    count = 1 if level == 0 else trie.counts[level - 1]
    nodes = torch.stack([torch.randperm(count)[:width] for _ in range(rows)])
    if nodes.shape[1] > 1:
        nodes[:, -1] = -1
    # Neighbors have the same score, so that some extensions of theirs do, to the last bit.
    pairs = -4 * torch.rand(rows, width).repeat_interleave(2, 1)[:, : nodes.shape[1]]
    return Beams(torch.where(nodes < 0, -torch.inf, pairs), nodes)


def extend(runner: Runner, logits, beams, trie, level, width, seen):
    """The new beams on the CPU."""

    def placed(tensors):
        moved = (t.to(runner.device) if isinstance(t, torch.Tensor) else t for t in tensors)
        if not runner.is_interpreted:
            return tuple(moved)
        return tuple(between_poison(t) if isinstance(t, torch.Tensor) and t.numel() else t for t in moved)

    leaves = beam_search._seen_leaves(trie, seen)
    step = beam_search.extend_beams if runner.backend == "reference" else beam_step
    edges, leaves = trie.edges(level), leaves
    beams, edges, leaves = (type(given)(*placed(given)) for given in (beams, edges, leaves))
    (logits,) = placed([logits])
    new, origins, codes = step(logits, beams, edges, width, leaves)
    return Beams(*(t.cpu() for t in new)), origins.cpu(), codes.cpu()


def in_a_loop(logits, beams, codes, level, width, seen):
    """For each row (score, beam, prefix) of the best legal extensions, the first of equal ones first."""
    prefixes = sorted({tuple(code[:level]) for code in codes.tolist()})
    rows = []
    for row, nodes in enumerate(beams.nodes.tolist()):
        hidden = {item for of, item in zip(seen.row.tolist(), seen.item.tolist(), strict=True) if of == row}
        left = {tuple(code[: level + 1]) for item, code in enumerate(codes.tolist()) if item not in hidden}
        extensions = []
        for beam, node in enumerate(nodes):
            log_probabilities = logits[row, beam].double().log_softmax(0)
            for prefix in sorted(left):
                if node >= 0 and prefix[:level] == prefixes[node]:
                    score = beams.scores[row, beam].double() + log_probabilities[prefix[-1]]
                    extensions.append((score.item(), beam, prefix))
        rows.append(sorted(extensions, key=lambda entry: -entry[0])[:width])
    return rows


@everywhere
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("count", [3, 40, 400])
def test_the_best_legal_extensions_are_kept_in_order(runner, level, count):
    torch.manual_seed(count + level)
    codes, rows = some_codes(count), 3
    trie = CodeTrie(codes, SIZES)
    # Row 0 has seen nothing, row 1 a few items twice and an unknown one, row 2 nearly everything.
    items = [[], [2, 0, 2, -1, count // 2], list(range(1, count))]
    pairs = torch.tensor([(row, item) for row, of in enumerate(items) for item in of])
    seen = SeenItems(pairs[:, 0], pairs[:, 1])
    beams = some_beams(trie, level, rows, 6)
    # Whole numbers, the same for neighboring beams, make equal scores.
    logits = torch.randint(-3, 3, (rows, beams.nodes.shape[1], SIZES[level])).float()
    logits[:, 1::2] = logits[:, 0:-1:2]
    width = min(9, trie.counts[level])
    new, origins, written = extend(runner, logits, beams, trie, level, width, seen)
    ordered = sorted({tuple(code[: level + 1]) for code in codes.tolist()})
    for row, expected in enumerate(in_a_loop(logits, beams, codes, level, width, seen)):
        kept = new.nodes[row] >= 0
        assert kept.tolist() == [True] * len(expected) + [False] * (width - len(expected))
        assert [ordered[node] for node in new.nodes[row][kept]] == [prefix for _, _, prefix in expected]
        assert origins[row][kept].tolist() == [beam for _, beam, _ in expected]
        assert written[row][kept].tolist() == [prefix[-1] for _, _, prefix in expected]
        scores = torch.tensor([score for score, _, _ in expected])
        torch.testing.assert_close(new.scores[row][kept], scores, rtol=1e-5, atol=1e-5)
        assert (new.scores[row][~kept] == -torch.inf).all()


@everywhere
def test_no_rows_and_nothing_seen(runner):
    trie = CodeTrie(some_codes(40), SIZES)
    nothing = torch.zeros(0, dtype=torch.int64)
    for rows in (0, 2):
        beams = Beams(torch.zeros(rows, 1), torch.zeros(rows, 1, dtype=torch.int64))
        logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0]).expand(rows, 1, 5)
        new, _, codes = extend(runner, logits, beams, trie, 0, 4, SeenItems(nothing, nothing))
        assert codes.tolist() == [[1, 3, 2, 0]] * rows and new.nodes.tolist() == [[1, 3, 2, 0]] * rows
