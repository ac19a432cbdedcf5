#!/usr/bin/env python3
"""Forward and backward of attention with a relative bias and without: time on the GPU and on the host.

    python experiments/2026-11-22-gpu-bias/steps.py [auto] [triton] [plain] [packed]

Shapes: that of the bar, and those of MovieLens-1M (512 users with up to 200 events). `auto` and `triton` are
without a bias; `plain` is with it by Triton alone, `packed` by inline assembly.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention  # noqa: E402
from recsys.ops.hstu_attention import triton_packed_launch  # noqa: E402

SHAPES = {
    "B32 L2048 H4 D64": (torch.full((32,), 2048), 4, 64),
    "B512 L20..200 H2 D32": (
        torch.randint(20, 201, (512,), generator=torch.Generator().manual_seed(1)),
        2,
        32,
    ),
    "B512 L20..200 H1 D64": (
        torch.randint(20, 201, (512,), generator=torch.Generator().manual_seed(1)),
        1,
        64,
    ),
    "B512 L20..200 H2 D25": (
        torch.randint(20, 201, (512,), generator=torch.Generator().manual_seed(1)),
        2,
        25,
    ),
}


def inputs(lengths, heads, dim):
    generator = torch.Generator().manual_seed(0)
    layout = SequenceLayout(lengths).to("cuda")
    tensors = [
        torch.randn(layout.total_len, heads, dim, generator=generator).to("cuda", torch.bfloat16)
        for _ in range(4)
    ]
    gaps = torch.rand(layout.total_len, generator=generator, dtype=torch.float64).mul(11).exp()
    times = 1_700_000_000 + gaps.cumsum(0).to(torch.int64).to("cuda")
    tables = [torch.randn(n, generator=generator).mul(0.02).cuda().requires_grad_() for n in (2048, 64)]
    bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60]))
    return layout, [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3], bias


def step(kind, layout, leaves, cotangent, bias):
    triton_packed_launch.PACKED = kind == "packed"
    biased = kind in ("plain", "packed")
    out = hstu_attention(
        *leaves,
        layout,
        AttentionMask(),
        scale_len=2048,
        bias=bias if biased else None,
        backend="auto" if kind == "auto" else "triton",
        deterministic=False,
    )
    torch.autograd.grad(out, [*leaves, bias.position_table, bias.time_table] if biased else leaves, cotangent)


def measure(run, repeats=20):
    """ms of GPU, of host and of both; the kernels that take longest."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    host = (time.perf_counter() - start) / repeats * 1e3
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / repeats * 1e3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    found = [(one.device_time_total / repeats / 1e3, one.key[:18]) for one in profiler.key_averages()]
    return sum(ms for ms, _ in found), host, whole, sorted(found, reverse=True)[:5]


def main():
    for name, shape in SHAPES.items():
        given = inputs(*shape)
        for kind in sys.argv[1:] or ("auto", "triton", "plain", "packed"):
            gpu, host, whole, kernels = measure(lambda kind=kind, given=given: step(kind, *given))
            longest = "  ".join(f"{ms:.3f} {kernel}" for ms, kernel in kernels)
            print(
                f"{name:<21} {kind:<7} GPU {gpu:.3f} host {host:.3f} both {whole:.3f} ms: {longest}",
                flush=True,
            )


if __name__ == "__main__":
    main()
