#!/usr/bin/env python3
"""Gradients of the Hopper kernels: right by both ways to sum dQ, and how fast, without host time.

backward.py check DIM       compares with float64; compiles
backward.py time            replays of graphs
backward.py host            host time of calls, by parts
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from recsys import environment

environment.prefer_packaged_ptxas()
from sections import replayed_ms  # noqa: E402

from recsys.ops import AttentionMask, SequenceLayout, hstu_attention  # noqa: E402
from recsys.ops.hstu_attention import reference, sm90_launch  # noqa: E402
from recsys.ops.hstu_attention.triton_launch import Problem  # noqa: E402
from scripts.bench_cases import cases  # noqa: E402
from scripts.bench_ops import make_inputs  # noqa: E402

NEVER, ALWAYS = 1e9, 1e-9


def gradients_of(problem, tensors, cotangent):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    rest = {"alpha": problem.alpha, "scale_len": problem.scale_len, "bias": None, "deterministic": False}
    out = reference.run(*leaves, problem.layout, problem.mask, **rest)
    return torch.autograd.grad(out, leaves, cotangent)


def check(dim: int) -> None:
    """Many samples, several times over, both ways; a sample of NaN among them leaves the others alone."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 400, (160,))
    lengths[:4] = torch.tensor([0, 1, 64, 128])
    layout = SequenceLayout(lengths, torch.minimum(lengths, torch.tensor(7))).to("cuda")
    for mask in (AttentionMask(), AttentionMask(window=100, prefix=10)):
        problem = Problem(layout, mask, dim**-0.5, 400.0, None)
        q, k, v, g = (
            torch.randn(layout.total_len, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        want = gradients_of(problem, [t.double() for t in (q, k, v)], g.double())
        theirs = gradients_of(problem, [q, k, v], g)
        for sm90_launch.SAMPLES_A_PROGRAM in (NEVER, ALWAYS):
            worst = 0.0
            for _ in range(6):
                got = sm90_launch.backward(g, q, k, v, problem, captured=False)[:3]
                for ours, exact, other in zip(got, want, theirs, strict=True):
                    allowed = 2 * (other - exact).norm() + 1e-3 * exact.norm()
                    error = float((ours - exact).norm() / allowed)
                    worst = max(worst, error if error == error else float("inf"))
            clean = got
            start, end = int(layout.offsets[50]), int(layout.offsets[51])
            dirty = [t.clone() for t in (q, k, v)]
            for tensor in dirty:
                tensor[start:end] = float("nan")
            outside = True
            for _ in range(3):
                got = sm90_launch.backward(g, *dirty, problem, captured=False)[:3]
                outside &= all(bool(t[:start].isfinite().all() & t[end:].isfinite().all()) for t in got)
                close = max(
                    float((a[end:] - b[end:]).norm() / b[end:].norm())
                    for a, b in zip(got, clean, strict=True)
                )
            whole = sm90_launch.SAMPLES_A_PROGRAM == ALWAYS
            print(f"D{dim} {mask.window} whole={whole}: {worst:.2f} of the allowed error, NaN stays inside: "
                  f"{outside} {close:.1e}", flush=True)  # fmt: skip


def times() -> None:
    ways = [("", 3.5, 40), ("parts", NEVER, 40)]
    wanted = {
        "B1024 L256 D64": ways,
        "B128 L1024 D128": [*ways, ("72 MB", 3.5, 72)],
        "B512 Pareto 16..2048 D128": ways[:1],
        "B8 L16384 D128 window 512 prefix 64": ways[:1],
        "B32 L2048 D64": [("", 3.5, 40), ("whole", ALWAYS, 72)],
    }
    for case in cases():
        for name, samples, megabytes in wanted.get(case.shape, ()):
            layout = case.layout().to("cuda")
            inputs = make_inputs(case, layout, 0)
            problem = Problem(layout, case.mask, case.dim**-0.5, float(case.lengths.max()), None)
            q, k, v = (tensor.detach() for tensor in inputs[:3])
            sm90_launch.SAMPLES_A_PROGRAM, sm90_launch.WHOLE_BYTES = samples, megabytes * 2**20
            ms = replayed_ms(sm90_launch.backward, inputs.cotangent, q, k, v, problem)
            print(f"{case.shape:<40} {name:<8} bwd {ms:.3f} ms", flush=True)


def host() -> None:
    case = next(case for case in cases() if "Pareto" in case.shape)
    case = replace(case, lengths=case.lengths[:4].clamp(max=128))
    layout = case.layout().to("cuda")
    inputs = make_inputs(case, layout, 0)
    problem = Problem(layout, case.mask, case.dim**-0.5, 1.0, None)
    q, k, v = (tensor.detach() for tensor in inputs[:3])
    outs = []

    def call(leaves):
        return hstu_attention(*leaves, layout, scale_len=1.0, backend="sm90")

    def backward():
        torch.autograd.grad(outs.pop(), inputs.leaves, inputs.cotangent)

    parts = {
        "forward, training": lambda: outs.append(call(inputs[:3])),
        "backward": backward,
        "forward, no gradients": lambda: call((q, k, v)),
        "launch of the forward": lambda: sm90_launch.forward(q, k, v, problem, captured=False),
        "launch of the backward": lambda: sm90_launch.backward(
            inputs.cotangent, q, k, v, problem, captured=False
        ),
        "empty_like": lambda: torch.empty_like(v, memory_format=torch.contiguous_format),
        "three empty": lambda: torch.empty(3, *q.shape, dtype=q.dtype, device=q.device).unbind(0),
        "zeros": lambda: torch.zeros(q.shape, dtype=torch.float32, device=q.device),
    }
    for rounds in range(2):
        for name, run in parts.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                run()
            spent = (time.perf_counter() - start) / 200 * 1e6
            torch.cuda.synchronize()
            if rounds:
                print(f"   {name}: {spent:.1f} us", flush=True)


if __name__ == "__main__":
    {"check": lambda: check(int(sys.argv[2])), "time": times, "host": host}[sys.argv[1]]()
