#!/usr/bin/env python3
"""Where the time of `top_k` goes on a GPU, with the kernels for Hopper or Triton's.

    python experiments/2026-11-22-gpu-topk/measure.py {sm90,triton} {bfloat16,float32}

10,000,000 made-up items of 128 numbers around 1,000 centres, 4,096 queries, top 10, drawn on the GPU. The
first 16 answers are compared with float64 before a time is printed. A kernel's time is that between two
events; milliseconds, medians of 4 calls after one.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys.ops.top_k import sm90_launch, triton_launch

ITEMS, WIDTH, QUERIES, K, CHECKED = 10_000_000, 128, 4096, 10, 16
PARTS = ("measure", "coarse", "choose")
SIZES = {
    "triton": [triton_launch.BLOCKS[128], triton_launch.Blocks(128, 128, 8, 2)],
    "sm90": [
        sm90_launch.SIZES[128],
        sm90_launch.Sizes(128, 6, 3, 1, 152, 24),
        sm90_launch.Sizes(256, 3, 2, 1, 240, 24),
        sm90_launch.Sizes(64, 12, 4, 1, 112, 24),
    ],
}
SETTINGS = [{"CHUNK_BYTES": 2**31}, {"PART": 16}, {"PART": 256}, {"CLASSES": 2048}, {"WARPS": 8}]


def vectors(count: int, centres: Tensor) -> Tensor:
    """Around the centres, of length 1."""
    made = torch.empty(count, WIDTH, device="cuda")
    for part in made.split(1 << 20):
        chosen = centres[torch.randint(len(centres), (len(part),), device="cuda")]
        part.copy_(F.normalize(chosen + torch.randn_like(part) * (0.7 / WIDTH**0.5), dim=1))
    return made


def truth(queries: Tensor, items: Tensor, removed: Tensor) -> Tensor:
    """float64 [CHECKED, K], the best scores; `removed` [QUERIES, n]."""
    scores = torch.cat([queries[:CHECKED].double() @ part.double().T for part in items.split(1 << 20)], dim=1)
    return scores.scatter(1, removed[:CHECKED].to(items.device), -torch.inf).topk(K).values


def watched(name: str, function, marks: list):
    """`function` between two events."""

    def call(*arguments, **rest):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(*arguments, **rest)
        end.record()
        marks.append((name, start, end))

    return call


def main() -> int:
    """Returns the exit code."""
    backend, dtype = sys.argv[1], getattr(torch, sys.argv[2])
    torch.manual_seed(1)
    centres = F.normalize(torch.randn(1000, WIDTH, device="cuda"), dim=1)
    items, queries = vectors(ITEMS, centres).to(dtype), vectors(QUERIES, centres)
    marks: list = []
    for name in ("measure", "choose"):
        setattr(triton_launch, name, watched(name, getattr(triton_launch, name), marks))

    def product(sizes) -> triton_launch.Product:
        if backend == "triton":
            plain = triton_launch.product_of(sizes)
            return plain._replace(launch=watched("coarse", plain.launch, marks))

        def launch(rows, items, maxima, num_groups):
            sm90_launch.launch_coarse(rows, items, maxima, num_groups, sizes)

        return triton_launch.Product(watched("coarse", launch, marks), sizes.group)

    def report(label: str, sizes, removed: Tensor) -> None:
        gone = (removed.flatten().cpu(), torch.full((QUERIES,), removed.shape[1]))
        rows, want = [], truth(queries, items, removed)
        for _ in range(5):
            marks.clear()
            torch.cuda.synchronize()
            began = time.perf_counter()
            found = triton_launch.run(queries, items, K, *gone, product(sizes))
            torch.cuda.synchronize()
            total = 1e3 * (time.perf_counter() - began)
            rows.append([total] + [sum(s.elapsed_time(e) for n, s, e in marks if n == p) for p in PARTS])
        error = (found.scores[:CHECKED].double() - want).abs().max().item()
        total, *parts = (statistics.median(column) for column in zip(*rows[1:], strict=True))
        said = "  ".join(f"{name} {value:.2f}" for name, value in zip(PARTS, parts, strict=True))
        speed = 2e-9 * ITEMS * WIDTH * QUERIES / parts[1]
        print(f"{label}: {total:.2f} ms  {said} ({speed:.0f} TFLOP/s)  error {error:.0e}", flush=True)

    random = torch.randint(ITEMS, (QUERIES, 50), device="cuda")
    for sizes in SIZES[backend]:
        report(f"{backend} {sys.argv[2]} {tuple(sizes)}", sizes, random)
    sizes = SIZES[backend][0]
    for setting in SETTINGS:
        before = {name: getattr(triton_launch, name) for name in setting}
        for name, value in setting.items():
            setattr(triton_launch, name, value)
        report(str(setting), sizes, random)
        for name, value in before.items():
            setattr(triton_launch, name, value)
    none = random[:, :0]
    gone = (none.flatten().cpu(), torch.zeros(QUERIES, dtype=torch.int64))
    best = triton_launch.run(queries, items, 50, *gone, product(sizes)).items
    more = torch.randint(ITEMS, (QUERIES, 2000), device="cuda")
    for label, removed in (("none", none), ("the best 50", best), ("2,000 at random", more)):
        report(f"removed: {label}", sizes, removed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
