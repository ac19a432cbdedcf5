"""Times of `hstu_attention_cached`, as CUDA graphs: 256 candidates of each row on 4,098 cached tokens.

python experiments/2026-11-22-gpu-serving/kernels.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys.ops import SequenceLayout, hstu_attention_cached
from recsys.ops.hstu_attention.cached import triton_ops

CACHED, NEW, HEADS, REPLAYS = 4098, 256, 4, 20


def microseconds(call: Callable[[], object]) -> float:
    """Of one replay."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPLAYS * 1e3


def main() -> None:
    """Prints a line a case."""
    in_parts = triton_ops.num_parts
    for dim in (64, 128):
        for rows in (32, 8, 1):
            counts = torch.full((rows,), NEW)
            new = SequenceLayout(counts, counts).to("cuda")
            old = SequenceLayout(torch.full((rows,), CACHED), None, 2).to("cuda")
            q, k, v, cache_k, cache_v = (
                torch.randn(rows * n, HEADS, dim, device="cuda", dtype=torch.bfloat16)
                for n in (NEW, NEW, NEW, CACHED, CACHED)
            )
            tensors = (q, k, v, new, cache_k, cache_v, old)
            flop = rows * NEW * (CACHED + 1) * HEADS * 4 * dim
            for name in ("triton", "triton in parts", "sm90"):
                triton_ops.num_parts = in_parts if name.endswith("parts") else lambda *_: 1
                attend = partial(hstu_attention_cached, *tensors, scale_len=8192.0, backend=name.split()[0])
                found = microseconds(attend)
                print(f"D{dim} rows {rows:2d} {name:16s} {found:7.1f} us {flop / found / 1e6:5.0f} TFLOP/s")


if __name__ == "__main__":
    main()
