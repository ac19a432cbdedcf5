"""The UVQK projection by cuBLAS and by the Hopper kernel, with what stands behind it, in turn in one process.

python experiments/2026-11-22-gpu-stu/projection.py
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys.ops import norm_mul_dropout
from recsys.ops.norm_linear import sm90_launch

SHAPES = ((131168, 1024, 4096), (263232, 256, 1024), (65536, 512, 2048))
"""Rows, width of a token, columns."""

ROUNDS = 15


def operands(rows: int, depth: int, columns: int, seed: int) -> list[Tensor]:
    """x, weight and bias."""
    torch.manual_seed(seed)
    sizes = ((rows, depth), (columns, depth), (columns,))
    x, weight, bias = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return [x, weight * depth**-0.5, bias]


def times(variants: dict[str, Callable[[int], object]]) -> dict[str, float]:
    """Medians, ms; variants in turn, each twice in a row, of which the second counts."""
    found: dict[str, list] = {name: [] for name in variants}
    for _ in range(ROUNDS):
        for name, run in variants.items():
            run(0)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(1)
            end.record()
            found[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in found.items()}


def bench(rows: int, depth: int, columns: int) -> None:
    """Prints a line a variant."""
    sets = [operands(rows, depth, columns, seed) for seed in range(2)]
    width = columns // 4
    attended = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(width, device="cuda"), torch.zeros(width, device="cuda")
    u = F.linear(*sets[0])[:, :width]
    gate = partial(norm_mul_dropout, attended, u, *norm, gate="ugn")

    def silu_of(first: int) -> Callable[[int], object]:
        return lambda i: F.silu(F.linear(*sets[i])[:, :first])

    found = times(
        {
            "cuBLAS": lambda i: F.linear(*sets[i]),
            "cuBLAS, SiLU of u by PyTorch": silu_of(width),
            "cuBLAS, SiLU of all by PyTorch": silu_of(columns),
            "kernel, SiLU of all": lambda i: sm90_launch.project(*sets[i]),
            "gate that applies SiLU to u": lambda i: gate(silu=True),
            "gate": lambda i: gate(),
        }
    )
    flop = 2 * rows * depth * columns
    print(f"T {rows} E {depth} N {columns}")
    for name, ms in found.items():
        print(f"  {name:32s} {ms:.3f} ms {flop / ms / 1e9:5.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        for shape in SHAPES:
            bench(*shape)
