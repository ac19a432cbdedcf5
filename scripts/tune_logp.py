#!/usr/bin/env python3
"""Finds the fastest block sizes for the kernels of `linear_logp` among those that compute correctly.

    python scripts/tune_logp.py [--width 64 128 256 512] [--rows 8192] [--candidates 131072] [--seconds 60]

The sizes are for bfloat16 without ids. Each choice is compiled and compared with the reference in a separate
process, which may take `--seconds`, so that an illegal access affects only that choice. Choices that pass are
timed one by one; enter the best ones into the tables of `recsys/ops/linear_logp/triton.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys import environment  # noqa: E402

environment.prefer_packaged_ptxas()
from recsys.ops.linear_logp import reference  # noqa: E402
from recsys.ops.linear_logp.recompute import (  # noqa: E402
    Gradients,
    Operands,
    OutputGrads,
    RequestedGrads,
    RowOutputs,
)
from scripts.bench_ops import median_ms  # noqa: E402

KIND = "16 bits"
PASSES = ("forward", "of hidden", "of weight")
CHECKED = (300, 1000)
"""Numbers of rows and candidates that are compared with the reference."""
ALLOWED = 0.01
"""Allowed error relative to the norm: a product in bfloat16 has 2^-9."""

# (rows, others, num_warps, num_stages, programs a processor)
FORWARD = {
    64: [
        (128, 64, 4, 4, 3),
        (128, 64, 4, 3, 4),
        (64, 64, 4, 4, 4),
        (64, 128, 4, 3, 3),
        (64, 128, 4, 3, 4),
        (256, 64, 8, 3, 2),
        (128, 32, 4, 4, 4),
    ],
    128: [
        (128, 128, 8, 2, 2),
        (128, 64, 8, 3, 2),
        (128, 64, 4, 3, 2),
        (64, 128, 4, 2, 3),
        (64, 64, 4, 3, 4),
        (64, 64, 4, 4, 3),
        (128, 64, 4, 2, 3),
        (64, 128, 4, 3, 2),
    ],
    256: [
        (128, 128, 8, 2, 1),
        (128, 64, 8, 3, 1),
        (128, 64, 8, 4, 1),
        (64, 64, 4, 2, 2),
        (64, 128, 4, 2, 1),
        (128, 32, 4, 3, 2),
        (256, 64, 8, 2, 1),
    ],
    512: [
        (64, 64, 4, 2, 1),
        (128, 64, 8, 1, 1),
        (128, 32, 4, 2, 1),
        (64, 128, 4, 1, 1),
        (64, 128, 8, 1, 1),
        (128, 64, 4, 1, 1),
    ],
}
BACKWARD = {
    64: [
        (128, 64, 4, 3, 2),
        (128, 64, 4, 4, 2),
        (64, 128, 4, 3, 2),
        (64, 128, 4, 3, 3),
        (64, 64, 4, 4, 4),
        (128, 32, 4, 4, 3),
    ],
    128: [
        (64, 64, 4, 3, 2),
        (64, 64, 4, 4, 2),
        (64, 64, 4, 3, 3),
        (64, 64, 4, 2, 3),
        (64, 128, 4, 2, 2),
        (64, 32, 4, 4, 3),
        (128, 64, 8, 4, 1),
        (128, 64, 4, 3, 1),
    ],
    256: [
        (128, 64, 8, 2, 1),
        (64, 64, 4, 2, 1),
        (64, 64, 4, 3, 1),
        (64, 32, 4, 2, 2),
        (64, 32, 4, 3, 2),
        (64, 128, 8, 2, 1),
        (128, 32, 8, 3, 1),
        (64, 64, 8, 3, 1),
    ],
    512: [
        (64, 64, 8, 2, 1),
        (64, 64, 8, 1, 1),
        (64, 128, 8, 1, 1),
        (64, 32, 8, 4, 1),
        (128, 64, 16, 1, 1),
    ],
}


class Choice(NamedTuple):
    """One kernel with sizes to try."""

    width: int
    direction: str
    number: int

    @property
    def sizes(self) -> tuple[int, ...]:
        table = FORWARD if self.direction == "forward" else BACKWARD
        return table[self.width][self.number]


def choices(widths: Sequence[int]) -> Iterator[Choice]:
    """Yields every size for every kernel."""
    for width in widths:
        for direction in PASSES:
            table = FORWARD if direction == "forward" else BACKWARD
            yield from (Choice(width, direction, number) for number in range(len(table[width])))


def problem(rows: int, candidates: int, width: int) -> tuple[Operands, RowOutputs]:
    """Returns unit vectors at temperature 0.05, and the reference's forward results."""
    generator = torch.Generator("cuda").manual_seed(0)

    def unit(count: int) -> Tensor:
        drawn = torch.randn(count, width, generator=generator, device="cuda")
        return torch.nn.functional.normalize(drawn, dim=1).bfloat16()

    target = torch.randint(candidates, (rows,), generator=generator, device="cuda")
    scale = torch.full((1,), 20.0, device="cuda")
    operands = Operands(unit(rows), unit(candidates), None, scale, target, None, None)
    maximum, total, score = reference.forward(operands)
    log_total = total.log()
    rows_found = [maximum, total, score - maximum - log_total, maximum + log_total]
    return operands, RowOutputs(*torch.stack(rows_found).unbind(0))


def run(choice: Choice, operands: Operands, outputs: RowOutputs) -> RowOutputs | Gradients:
    """Runs one pass with the chosen sizes; the upstream gradient is -1 for each logp."""
    from recsys.ops.linear_logp import triton as triton_ops

    tables = {
        "forward": triton_ops.FORWARD,
        "of hidden": triton_ops.OF_HIDDEN,
        "of weight": triton_ops.OF_WEIGHT,
    }
    tables[choice.direction][KIND][choice.width] = triton_ops.Blocks(*choice.sizes)
    if choice.direction == "forward":
        return triton_ops.fused_forward(operands, -1)
    of_weight = choice.direction == "of weight"
    wanted = RequestedGrads(not of_weight, of_weight, False, False)
    return triton_ops.fused_backward(operands, outputs, -torch.ones_like(outputs.logp), None, wanted)


def run_at(choice: Choice, operands: Operands, outputs: RowOutputs, _: int) -> None:
    """Calls `run` with the signature that `median_ms` needs."""
    run(choice, operands, outputs)


def check(choice: Choice) -> float:
    """Returns the error relative to the reference."""
    operands, outputs = problem(*CHECKED, choice.width)
    want: RowOutputs | Gradients = outputs
    if choice.direction != "forward":
        of_weight = choice.direction == "of weight"
        upstream = OutputGrads(outputs.maximum, 1 / outputs.total, torch.expm1(outputs.logp))
        want = reference.backward(operands, upstream, RequestedGrads(not of_weight, of_weight, False, False))
    worst = 0.0
    for got, right in zip(run(choice, operands, outputs), want, strict=True):
        if right is not None:
            error = (got.float() - right.float()).norm() / right.float().norm()
            worst = max(worst, float(error) if bool(error.isfinite()) else float("inf"))
    return worst


def passing(choices: list[Choice], seconds: float) -> list[Choice]:
    """Returns the choices that compile and are right; prints the others with their last line."""
    command = [sys.executable, __file__, "--check"]
    running = [
        subprocess.Popen(
            [*command, *map(str, choice)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for choice in choices
    ]
    good, end = [], time.monotonic() + seconds
    for choice, process in zip(choices, running, strict=True):
        try:
            errors = process.communicate(timeout=max(0.1, end - time.monotonic()))[1]
        except subprocess.TimeoutExpired:
            process.kill()
            errors = f"took over {seconds:.0f} s"
        if process.returncode == 0:
            good.append(choice)
        else:
            print(*choice[:2], choice.sizes, "FAILS:", (errors.strip().split("\n") or [""])[-1][:100])
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Finds the fastest block sizes for the kernels of linear_logp."
    )
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128, 256, 512], choices=sorted(FORWARD))
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--candidates", type=int, default=1 << 17)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this script needs a CUDA device", file=sys.stderr)
        return 2
    if options.check:
        width, direction, number = options.check
        error = check(Choice(int(width), direction, int(number)))
        if not error <= ALLOWED:
            sys.exit(f"off by {error:.2e} of the norm")
        return 0
    good = passing(list(choices(options.width)), options.seconds)
    for width in options.width:
        operands, outputs = problem(options.rows, options.candidates, width)
        for choice in (passed for passed in good if passed.width == width):
            ms = median_ms(partial(run_at, choice, operands, outputs), "cuda", options.repeats)
            flop = (2 if choice.direction == "forward" else 4) * options.rows * options.candidates * width
            line = (
                f"D{width}",
                f"{choice.direction:<10}",
                choice.sizes,
                f"{ms:.3f} ms {flop / ms / 1e9:.0f} TFLOP/s",
            )
            print(*line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
