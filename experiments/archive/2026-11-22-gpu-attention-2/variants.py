#!/usr/bin/env python3
"""Variants of the Hopper kernels: compared with float64, then timed in turn by replays of graphs.

variants.py check DIM NAME causal|window    in processes of their own: they compile side by side
variants.py time [SHAPE ...]                each variant once a round, so that a GPU that gets hot is fair
variants.py once BATCH LENGTH DIM           both backward ways, twice: for a profiler
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, SequenceLayout  # noqa: E402
from recsys.ops.hstu_attention import reference, sm90_launch, sm90_two_pass  # noqa: E402
from recsys.ops.hstu_attention.triton_launch import Problem  # noqa: E402
from scripts.bench_cases import cases, useful_flop  # noqa: E402

MASKS = {"causal": AttentionMask(), "window": AttentionMask(window=512, prefix=64)}
ROUNDS = 9


def forward(**changes):
    def run(_g, q, k, v, problem):
        sizes = sm90_launch.SIZES[q.shape[2]]._replace(**changes)
        return (sm90_launch.forward(q, k, v, problem, sizes),)

    return run


def two_passes(**changes):
    def run(g, q, k, v, problem):
        sizes = sm90_two_pass.SIZES[q.shape[2]]._replace(**changes)
        return sm90_two_pass.backward(g, q, k, v, problem, sizes)[:3]

    return run


def one_pass(g, q, k, v, problem):
    return sm90_launch.backward(g, q, k, v, problem)[:3]


FOR_ALL = {"forward": forward(), "two": two_passes()}
VARIANTS = {
    64: FOR_ALL
    | {
        "forward-one-tile": forward(q_tiles=1),
        "forward-128-keys": forward(keys=128, stages=3),
        "forward-three-strips": forward(**sm90_launch.LONG_SIZES[64]._asdict()),
        "one": one_pass,
        "two-wide-blocks": two_passes(keys=128, k_stages=3, v_stages=3),
    },
    128: FOR_ALL
    | {
        "forward-one-tile": forward(q_tiles=1),
        "forward-128-keys": forward(keys=128, stages=2),
        "forward-rows-not-held": forward(held=False),
        "forward-three-strips": forward(**sm90_launch.LONG_SIZES[128]._asdict()),
        "one": one_pass,
    },
    256: FOR_ALL,
}
"""By width of the heads."""


def inputs(layout: SequenceLayout, dim: int):
    shape = (layout.total_len, 4, dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def check(dim: int, name: str, mask: AttentionMask) -> None:
    """How far off on a ragged batch, relative to what `bench_ops.py` allows; whether the bits repeat."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 900, (40,))
    lengths[:6] = torch.tensor([1, 64, 128, 0, 1500, 129])
    layout = SequenceLayout(lengths, torch.minimum(lengths, torch.tensor(7))).to("cuda")
    problem = Problem(layout, mask, dim**-0.5, 400.0, None)
    q, k, v, g = inputs(layout, dim)

    def wanted(dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        rest = {"alpha": problem.alpha, "scale_len": 400.0, "bias": None, "deterministic": False}
        out = reference.run(*leaves, layout, mask, **rest)
        return (out.detach(),) if "forward" in name else torch.autograd.grad(out, leaves, g.to(dtype))

    exact, theirs = wanted(torch.float64), wanted(torch.bfloat16)
    worst, first, same = 0.0, None, True
    for _ in range(8):
        got = VARIANTS[dim][name](g, q, k, v, problem)
        for ours, right, other in zip(got, exact, theirs, strict=True):
            error = float((ours - right).norm() / (2 * (other - right).norm() + 1e-3 * right.norm()))
            worst = max(worst, error if error == error else float("inf"))
        first = first or [tensor.clone() for tensor in got]
        same &= all(torch.equal(a, b) for a, b in zip(first, got, strict=True))
    print(f"D{dim} {name} {mask.window}: {worst:.2f} of the allowed error, same bits: {same}", flush=True)


def graph_of(run, *arguments) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(*arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*arguments)
    return graph


def times(shapes: list[str]) -> None:
    for case in cases():
        if case.deterministic or case.biased or case.num_cached is not None:
            continue
        if shapes and case.shape not in shapes:
            continue
        layout = case.layout().to("cuda")
        problem = Problem(layout, case.mask, case.dim**-0.5, float(case.lengths.max()), None)
        q, k, v, g = inputs(layout, case.dim)
        graphs = {name: graph_of(run, g, q, k, v, problem) for name, run in VARIANTS[case.dim].items()}
        taken = {name: [] for name in graphs}
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                taken[name].append((start, end))
        torch.cuda.synchronize()
        flop = useful_flop(case)
        for name, pairs in taken.items():
            ms = sorted(start.elapsed_time(end) for start, end in pairs)[ROUNDS // 2]
            work = flop if "forward" in name else 2.5 * flop
            print(f"{case.shape:<48} {name:<18} {ms:.3f} ms {work / ms / 1e9:.0f} TFLOP/s", flush=True)


def once(batch: int, length: int, dim: int) -> None:
    lengths = torch.full((batch,), length)
    layout = SequenceLayout(lengths).to("cuda")
    problem = Problem(layout, AttentionMask(), dim**-0.5, float(length), None)
    q, k, v, g = inputs(layout, dim)
    for _ in range(2):
        one_pass(g, q, k, v, problem)
        two_passes()(g, q, k, v, problem)
    torch.cuda.synchronize()


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "check":
        check(int(rest[0]), rest[1], MASKS[rest[2]])
    elif what == "time":
        times(rest)
    else:
        once(*map(int, rest))
