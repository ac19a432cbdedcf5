"""Small steps of a beam search in the order A, B, A over rows, beams, codes and seen items, for compute-sanitizer.

    PYTHONPATH=. python experiments/2026-11-28-decoding/sanitize.py
        compares every step with plain PyTorch on a CPU, then repeats all of them 50 times without waiting
    compute-sanitizer --tool memcheck|racecheck --report-api-errors no python .../sanitize.py --short
        the same without repeating

Exit code 1 says what differs.
"""

import argparse
import sys
from typing import Any

import torch

from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.modules.beam_search import SeenItems, _seen_leaves, extend_beams  # noqa: E402
from recsys.modules.code_trie import CodeTrie  # noqa: E402
from recsys.ops.beam_step import Beams, beam_step  # noqa: E402

GUARD = 4096
"""Elements of absurd value on either side of each input."""
SMALL = (2, 3, 5, (7, 9, 5), 60, 4)
CASES = (SMALL, (16, 200, 200, (256, 256, 31), 40_000, 900), SMALL, (1, 512, 512, (256, 300, 17), 90_000, 0), SMALL)
"""Rows, beams, width, sizes of levels, items, seen items of a row."""


def guarded(value: Any) -> Any:
    """Tensors on the GPU between bands of absurd numbers, which a read out of bounds would carry into results."""
    if not isinstance(value, torch.Tensor):
        return value
    absurd = float("nan") if value.is_floating_point() else 2**30
    whole = torch.full((value.numel() + 2 * GUARD,), absurd, dtype=value.dtype, device="cuda")
    part = whole[GUARD : GUARD + value.numel()].view(value.shape)
    return part.copy_(value)


def problems() -> list[tuple[Any, ...]]:
    """The arguments of all steps, on the CPU."""
    made = []
    for rows, beams, width, sizes, items, seen_each in CASES:
        numbers = torch.randperm(sizes[0] * sizes[1] * sizes[2])[:items]
        codes = torch.stack([numbers // (sizes[1] * sizes[2]), numbers // sizes[2] % sizes[1], numbers % sizes[2]], 1)
        trie = CodeTrie(codes, sizes)
        seen = SeenItems(torch.arange(rows).repeat_interleave(seen_each), torch.randint(-1, items, (rows * seen_each,)))
        for level in range(3):
            count = 1 if level == 0 else trie.counts[level - 1]
            nodes = torch.stack([torch.randperm(count)[:beams] for _ in range(rows)])
            nodes[:, nodes.shape[1] - 1] = -1 if level else 0
            scores = torch.where(nodes < 0, -torch.inf, torch.randn(nodes.shape))
            logits = torch.randn(*nodes.shape, sizes[level])
            wanted = min(width, trie.counts[level])
            made.append((logits, Beams(scores, nodes), trie.edges(level), wanted, _seen_leaves(trie, seen)))
    return made


def main() -> int:
    """Runs all steps and compares them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    short = parser.parse_args().short
    torch.manual_seed(0)
    steps = problems()
    on_gpu = []
    for logits, beams, edges, width, seen in steps:
        placed = (type(given)(*map(guarded, given)) for given in (beams, edges, seen))
        of_beams, of_edges, of_seen = placed
        on_gpu.append((guarded(logits), of_beams, of_edges, width, of_seen))
    results = [beam_step(*step) for step in on_gpu]
    wrong = 0
    for number, (step, (new, origins, codes)) in enumerate(zip(steps, results, strict=True)):
        expected = extend_beams(*step)
        alive = expected.beams.nodes >= 0
        pairs = ((new.nodes, expected.beams.nodes), (origins, expected.origins), (codes, expected.codes))
        differ = [name for name, (got, want) in zip(("nodes", "origins", "codes"), pairs, strict=True)
                  if not torch.equal(got.cpu()[alive], want[alive])]  # fmt: skip
        close = torch.allclose(new.scores.cpu()[alive], expected.beams.scores[alive], rtol=1e-5, atol=1e-5)
        if differ or not close or not torch.equal(new.nodes.cpu() < 0, ~alive):
            wrong += 1
            print(f"step {number}: {', '.join(differ) or 'scores'} differ")
    if not short:
        again = [beam_step(*step) for _ in range(50) for step in on_gpu]
        for number, extended in enumerate(again):
            first = results[number % len(results)]
            if not (torch.equal(extended.beams.nodes, first.beams.nodes) and torch.equal(extended.codes, first.codes)):
                wrong += 1
                print(f"repetition {number} differs")
    print(f"{len(results)} steps, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
