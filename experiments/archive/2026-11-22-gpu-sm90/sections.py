#!/usr/bin/env python3
"""Forward and backward on the GPU by the bytes of a section: replays of captured graphs, without the host."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops.hstu_attention import sm90_launch  # noqa: E402
from recsys.ops.hstu_attention.triton_launch import Problem  # noqa: E402
from scripts.bench_cases import cases  # noqa: E402
from scripts.bench_ops import make_inputs  # noqa: E402


def replayed_ms(function, *arguments) -> float:
    """Median of replays of a graph of one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*arguments)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(9)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[4]


def main() -> None:
    names, megabytes = sys.argv[1].split(","), [int(one) for one in sys.argv[2].split(",")]
    for case in cases():
        if case.deterministic or case.biased or case.num_cached is not None:
            continue
        if not any(name in case.shape for name in names):
            continue
        layout = case.layout().to("cuda")
        inputs = make_inputs(case, layout, 0)
        problem = Problem(layout, case.mask, case.dim**-0.5, float(case.lengths.max()), None)
        q, k, v = (tensor.detach() for tensor in inputs[:3])
        for size in megabytes:
            sm90_launch.CACHED_BYTES = size * 2**20 if size else 2**60
            forward = replayed_ms(sm90_launch.forward, q, k, v, problem)
            backward = replayed_ms(sm90_launch.backward, inputs.cotangent, q, k, v, problem)
            print(f"{case.shape:<40} section {size:3d} MB  fwd {forward:.3f}  bwd {backward:.3f}", flush=True)


if __name__ == "__main__":
    main()
