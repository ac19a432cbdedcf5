#!/usr/bin/env python3
"""Find the fastest block sizes of attention's Triton kernels: compile and check in parallel, then time.

    python scripts/tune_triton.py [--kernel forward keys] [--dim 64 128 256] [--shape L4096] [--seconds 120]

Each choice is compiled and compared with the reference in a separate process, and all must be done after
`--seconds`, so that a deadlock or an illegal access affects only that choice. Choices that pass are timed
one after the other, without bias, in bfloat16. Enter the best ones into `block_sizes.py` if they do not
spill with any kind of mask; `tests/ops/hstu_attention/test_triton_compile.py` checks this.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys import environment  # noqa: E402

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, SequenceLayout  # noqa: E402
from recsys.ops.hstu_attention import reference  # noqa: E402
from recsys.ops.hstu_attention import triton as triton_launch  # noqa: E402
from recsys.ops.hstu_attention.block_sizes import Blocks  # noqa: E402
from recsys.ops.hstu_attention.problem import Gradients, Problem  # noqa: E402
from recsys.ops.runtime.launch import unwrapped  # noqa: E402
from scripts.bench_cases import Case, cases, useful_flop  # noqa: E402

PRODUCTS = {"forward": 2, "described": 2, "keys": 4, "grad_k": 3, "grad_v": 2, "rows": 3}

CHOICES = {
    # (kernel, width of the heads): rows, keys, num_warps, num_stages
    ("forward", 64): [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3)],
    ("forward", 128): [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 32, 4, 3)],
    ("forward", 256): [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4)],
    ("described", 64): [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3)],
    ("described", 128): [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (64, 32, 4, 3)],
    ("described", 256): [(128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4)],
    ("keys", 64): [(64, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 4), (32, 64, 4, 4)],
    ("keys", 128): [(64, 128, 8, 3), (32, 128, 8, 4), (64, 64, 4, 3)],
    ("keys", 256): [(32, 64, 8, 2), (32, 64, 8, 3)],
    ("grad_k", 256): [(32, 128, 8, 2), (64, 64, 8, 2)],
    ("grad_v", 256): [(32, 128, 8, 3), (32, 128, 8, 4), (64, 128, 8, 2)],
    ("rows", 64): [(64, 64, 4, 3), (128, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4)],
    ("rows", 128): [(128, 64, 8, 3), (64, 64, 4, 3), (128, 32, 8, 4)],
    ("rows", 256): [(128, 32, 8, 2), (128, 16, 8, 3)],
}


class Choice(NamedTuple):
    """Block sizes to try for one kernel."""

    kernel: str
    dim: int
    blocks: Blocks

    def __str__(self) -> str:
        rows, keys, warps, stages = self.blocks[:4]
        return f"{self.kernel:<9} D{self.dim:<3} {rows:>3} x {keys:<3} {warps} warps {stages} stages"


class Batch(NamedTuple):
    """Inputs and outputs of the kernels."""

    problem: Problem
    inputs: tuple[torch.Tensor, ...]  # q, k, v, grad_out
    out: Gradients


def batch_of(lengths: torch.Tensor, dim: int, heads: int, seed: int = 0) -> Batch:
    """Make a batch on the GPU: q, k and v are parts of one projection."""
    layout = SequenceLayout(lengths).to("cuda")
    torch.manual_seed(seed)
    uvqk = torch.randn(layout.total_len, 4 * heads * dim, device="cuda", dtype=torch.bfloat16)
    parts = [part.view(-1, heads, dim) for part in uvqk.split(heads * dim, 1)]
    made = [torch.full_like(part, torch.nan, memory_format=torch.contiguous_format) for part in parts[:3]]
    problem = Problem(layout, AttentionMask(), dim**-0.5, 4096.0, None)
    return Batch(problem, tuple(parts), Gradients(*made, None, None))


def launch(choice: Choice, batch: Batch) -> list[torch.Tensor]:
    """Launch the kernel and return its outputs."""
    triton_launch.can_describe = lambda *_: choice.kernel == "described"
    triton_launch.blocks_for = lambda *_: choice.blocks
    problem, given, out = batch
    if choice.kernel in ("forward", "described"):
        return [triton_launch.forward(*given[:3], problem)]
    if choice.kernel == "rows":
        triton_launch._launch_rows(given, out, problem, unwrapped)
        return [out.q]
    triton_launch._launch_keys(choice.kernel, given, out, problem, None, unwrapped)
    return {"keys": [out.k, out.v], "grad_k": [out.k], "grad_v": [out.v]}[choice.kernel]


def check(choice: Choice) -> float:
    """Return the error of a choice on a ragged batch relative to the allowed one; above 1 is wrong."""
    batch = batch_of(torch.tensor([1, 64, 700, 129, 1000, 33]), choice.dim, 2)
    ours = launch(choice, batch)
    problem, (*qkv, grad_out), _ = batch
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in qkv]
        out = reference.run(*leaves, problem)
        q, k, v = torch.autograd.grad(out, leaves, grad_out.to(dtype))
        made = {"rows": [q], "keys": [k, v], "grad_k": [k], "grad_v": [v]}
        results.append(made.get(choice.kernel, [out]))
    worst = 0.0
    for got, plain, want in zip(ours, *results, strict=True):
        plain, want = plain.detach().double(), want.detach()
        ratio = float((got.double() - want).norm() / (2 * (plain - want).norm() + 1e-3 * want.norm()))
        worst = max(worst, ratio if ratio == ratio else float("inf"))
    return worst


def median_ms(run, repeats: int = 12) -> float:
    """Return the median time of `run(i)` in ms, after three calls that do not count."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 3)]
    for i, (start, end) in enumerate(events):
        start.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events[3:])[repeats // 2]


def time_choices(shape: Case, choices: list[Choice], results) -> None:
    """Print one line per choice, the fastest of each kernel last: useful FLOP of all its products."""
    lines = []
    sets = [batch_of(shape.lengths, shape.dim, shape.heads, seed) for seed in range(2)]
    for kernel in PRODUCTS:
        of_kernel = [choice for choice in choices if choice.kernel == kernel]
        flop = useful_flop(shape) * PRODUCTS[kernel] / 2
        timed = []
        for choice in of_kernel:
            ms = median_ms(lambda i, choice=choice: launch(choice, sets[i % 2]))
            timed.append((ms, f"{ms:8.3f} ms {flop / ms / 1e9:5.0f} TFLOP/s  {choice}"))
        lines += [line for _, line in sorted(timed, reverse=True)]
    results.put("\n".join([shape.shape, *lines]))


def in_process(target, *arguments):
    """Run `target(*arguments, queue)` in a separate process; return the process and the queue."""
    context = multiprocessing.get_context("fork")  # what was imported need not be imported again
    queue = context.SimpleQueue()
    process = context.Process(target=target, args=(*arguments, queue), daemon=True)
    process.start()
    return process, queue


def _check(choice: Choice, results) -> None:
    try:
        results.put(check(choice))
    except Exception as error:  # noqa: BLE001
        results.put(f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:150]}")


def passing(choices: list[Choice], seconds: float, at_a_time: int) -> list[Choice]:
    """Return the choices whose results are right."""
    end, waiting, running, passed = time.monotonic() + seconds, list(choices), [], []
    while waiting or running:
        while waiting and len(running) < at_a_time:
            choice = waiting.pop(0)
            running.append((choice, *in_process(_check, choice)))
        time.sleep(0.02)
        late = time.monotonic() > end
        for entry in list(running):
            choice, process, queue = entry
            if process.is_alive() and queue.empty() and not late:
                continue
            outcome = "took too long, or died" if queue.empty() else queue.get()
            running.remove(entry)
            process.kill() if late else process.join(20)
            if isinstance(outcome, float) and outcome <= 1:
                passed.append(choice)
            else:
                print(f"{choice}: NO: {outcome}", flush=True)
        if late:
            waiting = []
    return [choice for choice in choices if choice in passed]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Finds the fastest block sizes of attention's Triton kernels."
    )
    parser.add_argument("--kernel", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--shape", action="append", help="only shapes whose name contains this")
    parser.add_argument("--seconds", type=float, default=120, help="time limit for all checks together")
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    choices = [
        Choice(kernel, dim, Blocks(*sizes))
        for (kernel, dim), sizes_of_kernel in CHOICES.items()
        for sizes in sizes_of_kernel
        if kernel in options.kernel and dim in options.dim
    ]
    begun = time.monotonic()
    passed = passing(choices, options.seconds, options.processes)
    print(f"{len(passed)} of {len(choices)} are right, {time.monotonic() - begun:.0f} s", flush=True)
    for shape in cases()[:8]:
        fitting = [choice for choice in passed if choice.dim == shape.dim]
        if fitting and (not options.shape or any(name in shape.shape for name in options.shape)):
            process, queue = in_process(time_choices, shape, fitting)
            process.join(60)
            print("no times" if queue.empty() else queue.get(), flush=True)
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
