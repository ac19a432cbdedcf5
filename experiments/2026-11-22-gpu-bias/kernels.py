#!/usr/bin/env python3
"""Which kernel of attention with bias takes how long, for several block sizes, each in a process of its own.

    python experiments/2026-11-22-gpu-bias/kernels.py [--dim 64] [--only KERNEL] [--plain] [--packed]

Each choice is first compared with the reference in float64 on a ragged batch: how far off it is, relative to
what `scripts/bench_ops.py` allows.
"""

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout  # noqa: E402
from recsys.ops.hstu_attention import (  # noqa: E402
    reference,
    sm90_biased_launch,
    triton_launch,
    triton_packed_launch,
)
from recsys.ops.hstu_attention.blocks import Blocks  # noqa: E402
from recsys.ops.hstu_attention.triton_bias_launch import (  # noqa: E402
    packed_arguments,
    packed_parts,
    packed_tables,
)
from recsys.ops.hstu_attention.triton_launch import Gradients, Problem, unwrapped  # noqa: E402
from recsys.ops.hstu_attention.work_list import row_work  # noqa: E402

CHOICES = {
    64: {
        "forward": [(64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 3), (64, 64, 4, 1)],
        "keys": [(32, 64, 4, 3), (32, 128, 8, 2), (64, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 2)],
        "rows": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2)],
        "tables": [(64, 32, 4, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 32, 8, 2)],
    },
}

# By inline assembly; the last number: at most so many registers. `sums`: dK and dV with those of the tables;
# `backward`: all gradients by one kernel, which has one size.
PACKED_CHOICES = {
    64: {
        "prepare": [(64, 64, 4, 3)],
        "forward": [(64, 64, 4, 2, 128), (64, 64, 4, 2, 168)],
        "keys": [(64, 64, 4, 2, 168), (64, 64, 4, 3, 168), (64, 64, 4, 3)],
        "rows": [(64, 64, 4, 3, 168)],
        "sums": [(64, 64, 4, 3)],
        "backward": [(64, 64, 4, 2)],
    },
}


def gpu_ms(run, repeats=20):
    """GPU time of all that `run(i)` starts, by the profiler: events would see a host that is behind."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for i in range(repeats):
            run(i)
        torch.cuda.synchronize()
    return sum(one.device_time_total for one in profiler.key_averages()) / repeats / 1e3


class Batch(NamedTuple):
    """Inputs, and what is prepared for a bias once for all kernels."""

    layout: SequenceLayout
    tensors: list[torch.Tensor]
    tables: list[torch.Tensor]
    times: torch.Tensor
    following: torch.Tensor
    made: dict


def batch_of(lengths, dim, heads=4, dtype=torch.bfloat16, seed=0):
    layout = SequenceLayout(lengths).to("cuda")
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(layout.total_len, heads, dim, generator=generator).to("cuda", dtype) for _ in range(4)
    ]
    gaps = torch.rand(layout.total_len, generator=generator, dtype=torch.float64).mul(11).exp()
    times = 1_700_000_000 + gaps.cumsum(0).to(torch.int64).to("cuda")
    following = torch.cat([times[1:], times[-1:] + 60])
    tables = [torch.randn(heads, size, generator=generator).cuda() for size in (2048, 64)]
    return Batch(layout, tensors, tables, times, following, {})


def launch(kernel, blocks, batch, biased=True):
    triton_launch.blocks_of = lambda *_, **__: Blocks(*blocks)
    layout, (q, k, v, grad_out), tables, times, following, made = batch
    bias = RelativeBias(*tables, times, following) if biased else None
    problem = Problem(layout, AttentionMask(), q.shape[2] ** -0.5, 2048.0, bias, made=made)
    if kernel == "prepare":
        items = row_work(problem.mask, layout, *blocks[:2])
        given = layout, items, blocks[:2]
        arguments = packed_arguments(bias, packed_tables(bias, layout), *given, True)
        times = bias.timestamps, bias.next_timestamps
        for _ in packed_parts(arguments, times, *given, (problem.mask, True, None)):
            pass
        return []
    if kernel == "forward":
        return [triton_launch.forward(q, k, v, problem)]
    if kernel == "tables":
        return list(triton_launch._table_gradients(q, k, v, grad_out, problem, bias, unwrapped))
    out = Gradients(*map(torch.empty_like, (q, k, v)), None, None)
    if kernel == "backward":
        return list(sm90_biased_launch.backward(q, k, v, grad_out, out, problem, bias))
    if kernel == "rows":
        triton_launch._launch_rows(q, k, v, grad_out, out, problem, unwrapped)
        return [out.q]
    sums = triton_packed_launch.zero_sums(q, layout.max_len, bias) if kernel == "sums" else None
    triton_launch._launch_keys("keys", q, k, v, grad_out, out, problem, sums, unwrapped)
    return [out.k, out.v, *(triton_packed_launch.finished(sums, problem.scale_len, bias) if sums else [])]


def check(kernel, blocks, dim):
    batch = batch_of(torch.tensor([1, 64, 700, 129, 1000, 33]), dim, 2)
    layout, tensors, tables, times, following, _ = batch
    ours = launch(kernel, blocks, batch)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors[:3]]
        leaves += [
            t.detach().to(torch.float32 if dtype == torch.bfloat16 else dtype).requires_grad_()
            for t in tables
        ]
        out = reference.run(
            *leaves[:3],
            layout,
            AttentionMask(),
            alpha=dim**-0.5,
            scale_len=2048.0,
            bias=RelativeBias(*leaves[3:], times, following),
            deterministic=False,
        )
        grads = torch.autograd.grad(out, leaves, tensors[3].to(dtype))
        found = {"forward": [out], "rows": grads[:1], "keys": grads[1:3], "tables": grads[3:]}
        found |= {"sums": grads[1:], "backward": grads, "prepare": []}
        results.append(found[kernel])
    worst = 0.0
    for got, other, want in zip(ours, *results, strict=True):
        other, want = other.detach().double(), want.detach()
        found = float((got.double() - want).norm() / (2 * (other - want).norm() + 1e-3 * want.norm()))
        worst = max(worst, found if found == found else float("inf"))
    return worst


def work(kernel, blocks, dim, plain, checked, timed, ready):
    try:
        error = 0.0 if plain else check(kernel, blocks, dim)
        sets = [batch_of(torch.full((32,), 2048), dim, seed=seed) for seed in range(2)]
        launch(kernel, blocks, sets[0], not plain)
        torch.cuda.synchronize()
        checked.put(error)
        ready.get()
        timed.put(gpu_ms(lambda i: launch(kernel, blocks, sets[i % 2], not plain)))
    except Exception as error:  # noqa: BLE001
        checked.put(f"{type(error).__name__}: {str(error)[-300:]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--plain", action="store_true", help="without bias")
    parser.add_argument("--packed", action="store_true", help="with the bias by inline assembly")
    options = parser.parse_args()
    triton_packed_launch.PACKED = options.packed
    context = multiprocessing.get_context("fork")
    running = []
    choices = PACKED_CHOICES if options.packed else CHOICES
    for kernel, found in choices[options.dim].items():
        if options.only and kernel not in options.only or (options.plain and kernel == "tables"):
            continue
        for blocks in found:
            queues = [context.Queue() for _ in range(3)]
            process = context.Process(
                target=work, args=(kernel, blocks, options.dim, options.plain, *queues), daemon=True
            )
            process.start()
            running.append((kernel, blocks, process, *queues))
    results = []
    for _, _, _, checked, _, _ in running:
        try:
            results.append(checked.get(timeout=70))
        except Exception:  # noqa: BLE001
            results.append("took too long, or died")
    for (kernel, blocks, process, _, timed, ready), error in zip(running, results, strict=True):
        ms = None
        if isinstance(error, float):
            ready.put(True)
            try:
                ms = timed.get(timeout=15)
            except Exception:  # noqa: BLE001
                error = "no time"
        process.kill()
        shown = f"{error:.2f}" if isinstance(error, float) else error
        print(
            f"{kernel:<8} {str(blocks):<20} error {shown}  {'-' if ms is None else f'{ms:.3f} ms'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
