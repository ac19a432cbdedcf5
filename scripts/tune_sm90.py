#!/usr/bin/env python3
"""Finds the fastest sizes for the Hopper forward kernel: checks them in parallel, then times all.

    python scripts/tune_sm90.py [--dim 64 128 256] [--shape L4096] [--section 0 12 24 48] [--seconds 120]

Each choice is compiled and compared with the reference in a separate process, which may take `--seconds`,
so that a deadlock or an illegal access affects only that choice. Choices that pass are timed in turn, for
several rounds, because a GPU that gets hot is slower.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys import environment  # noqa: E402

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, SequenceLayout  # noqa: E402
from recsys.ops.hstu_attention import Problem, reference  # noqa: E402
from scripts.bench_cases import Case, cases, useful_flop  # noqa: E402

if TYPE_CHECKING:
    from recsys.ops.hstu_attention.hopper.forward import ForwardSizes

CHANGES: dict[int, tuple[list[dict[str, int | bool]], list[dict[str, int | bool]]]] = {
    64: (
        [{}, {"held": False}, {"q_tiles": 1}, {"keys": 128, "stages": 3}],
        [{}, {"held": False}, {"stages": 4}],
    ),
    128: (
        [{}, {"held": False}, {"q_tiles": 1, "stages": 5}, {"keys": 128, "stages": 2}],
        [{}],
    ),
    256: ([{}, {"computing_registers": 240, "loading_registers": 24}, {"keys": 32, "stages": 4}], []),
}
"""Changes to try, by width of the heads: to the entry of `SIZES`, then to that of `LONG_SIZES`."""

ROUNDS, CALLS = 5, 4


def choices_of(dim: int) -> list[ForwardSizes]:
    """Returns the sizes in use, and those that differ from them by one of `CHANGES`."""
    from recsys.ops.hstu_attention.hopper.forward import LONG_SIZES, SIZES

    both = zip((SIZES, LONG_SIZES), CHANGES[dim], strict=True)
    return [sizes[dim]._replace(**change) for sizes, changes in both for change in changes]


def inputs(lengths: torch.Tensor, dim: int, heads: int, seed: int = 0):
    """Returns the layout on the GPU, and q, k, v as parts of one projection."""
    layout = SequenceLayout(lengths).to("cuda")
    torch.manual_seed(seed)
    uvqk = torch.randn(layout.total_len, 3 * heads * dim, device="cuda", dtype=torch.bfloat16)
    parts = [part.view(-1, heads, dim) for part in uvqk.split(heads * dim, 1)]
    return Problem(layout, AttentionMask(), dim**-0.5, 4096.0), parts


def check(dim: int, number: int) -> float:
    """Returns the error of a choice on a ragged batch relative to the allowed one; above 1 is wrong."""
    from recsys.ops.hstu_attention.hopper import forward

    problem, parts = inputs(torch.tensor([1, 64, 700, 129, 1000, 33]), dim, 2)
    out = forward.forward(*parts, problem, choices_of(dim)[number]).double()
    want = reference.run(*(part.double() for part in parts), problem)
    theirs = reference.run(*parts, problem).double()
    ratio = float((out - want).norm() / (2 * (theirs - want).norm() + 1e-3 * want.norm()))
    return ratio if ratio == ratio else float("inf")


def milliseconds(run) -> list[float]:
    """Returns the times of `CALLS` calls, after a warm-up."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(1 + CALLS)]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events[1:]]


def time_choices(shape: Case, numbers: list[int], sections: list[int]) -> None:
    """Prints one line per choice and size of the sections, the fastest last."""
    from recsys.ops.hstu_attention.hopper import forward

    sets = [inputs(shape.lengths, shape.dim, shape.heads, seed) for seed in range(2)]
    flop, choices = useful_flop(shape), choices_of(shape.dim)
    taken: dict[tuple[int, int], list[float]] = {pair: [] for pair in itertools.product(numbers, sections)}
    for _round in range(ROUNDS):
        for (number, section), times in taken.items():
            forward.CACHED_BYTES = section * 2**20 if section else 2**60

            def run(i: int, sizes=choices[number]) -> None:
                problem, parts = sets[i % 2]
                forward.forward(*parts, problem, sizes)

            times += milliseconds(run)
    medians = {pair: statistics.median(times) for pair, times in taken.items()}
    print(shape.shape)
    for (number, section), ms in sorted(medians.items(), key=lambda pair: -pair[1]):
        speed = f"{ms:8.3f} ms {flop / ms / 1e9:6.0f} TFLOP/s"
        print(f"{speed}  section {section:3d} MB  {choices[number]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Finds the fastest sizes for the Hopper forward kernel.")
    parser.add_argument("--dim", type=int, nargs="+", choices=list(CHANGES), default=list(CHANGES))
    parser.add_argument("--shape", action="append", help="only shapes whose name contains this")
    parser.add_argument(
        "--section", type=int, nargs="+", default=[24], help="size of a section in MB; 0 for no sections"
    )
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--check", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        ratio = check(*options.check)
        print(f"{ratio:.2f} of the allowed error")
        return 0 if ratio <= 1 else 1
    choices = [(dim, number) for dim in options.dim for number in range(len(choices_of(dim)))]
    command = [sys.executable, __file__, "--check"]
    running = [
        (
            dim,
            number,
            subprocess.Popen(
                [*command, str(dim), str(number)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ),
        )
        for dim, number in choices
    ]
    end, passed = time.monotonic() + options.seconds, []
    for dim, number, process in running:
        try:
            text = process.communicate(timeout=max(1.0, end - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            text = "took too long: a deadlock?"
        if process.returncode == 0:
            passed.append((dim, number))
        else:
            print(
                f"D{dim} {choices_of(dim)[number]}: NO: {' | '.join(text.strip().splitlines()[-2:])}",
                flush=True,
            )
    for shape in cases()[:8]:
        numbers = [number for dim, number in passed if dim == shape.dim]
        if numbers and (not options.shape or any(name in shape.shape for name in options.shape)):
            time_choices(shape, numbers, options.section)
    return 0


if __name__ == "__main__":
    sys.exit(main())
