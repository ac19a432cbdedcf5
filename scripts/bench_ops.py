#!/usr/bin/env python3
"""Measures the speed of attention on a GPU; each case is checked before it is timed.

    python scripts/bench_ops.py [--backend sm90 ...] [--case NAME ...] [--record FILE] [--quick]

The check compares output and all gradients of a backend in bfloat16 with float64, on the same inputs and
some samples of the batch. The error may be twice that of the reference backend in bfloat16. The timing
alternates several sets of inputs and uses CUDA events (medians): `fwd`, and `bwd` alone. On a GPU all cases
are checked first, in several processes, since compiling kernels takes most of that time. Useful FLOP count
visible pairs: 2 (D + V) per pair and head forward, and 2.5 times as many backward. Cases with a cache
measure `hstu_attention_cached`, forward only, compared with `hstu_attention` on whole samples. Cases that a
backend does not support are skipped with the reason. `--record` writes a list of `{op, backend, shape,
pass, ms, tflops, peak_mb, ok, commit}`; a wrong case has no time. `bench_cases.py` defines the cases.

On a CPU, tiny shapes test the script itself. The exit code is 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys.ops import (  # noqa: E402
    CachedRelativeBias,
    RelativeBias,
    SequenceLayout,
    explain,
    hstu_attention,
    hstu_attention_cached,
    last_backend,
)
from scripts import bench_records  # noqa: E402
from scripts.bench_cases import CACHED_OP, OP, Case, cases, tiny_cases, useful_flop  # noqa: E402

BACKWARD_FLOP = 2.5
"""FLOP of the backward relative to the forward: five products instead of two."""

FACTOR = 2.0
"""Allowed error relative to the reference's in bfloat16."""

CHECKED_TOKENS = 4096
"""About this many tokens of a case are compared, in whole samples: each pair has a float64 score."""

INPUT_SETS = 3
"""Sets of inputs that are timed in turn, so that the caches do not hold the operands."""

REST = 0.3
"""Seconds of rest before a pass is timed, because a GPU that is still hot is slower."""

MOST_WORKERS = 14
"""Most processes that compare; each takes 0.5 GB of the GPU's memory."""

LONG = 8192
"""From this many tokens per sample on, one process compares at a time: float64 scores take 10 GB and more."""

_long: Lock | None = None
"""Lock of the processes that compare long samples."""


class CachedInputs(NamedTuple):
    """The arguments of a call with a cache."""

    arguments: tuple[Tensor | SequenceLayout, ...]  # q, k, v, layout, cache_k, cache_v, cache_layout
    bias: CachedRelativeBias | None


class Inputs(NamedTuple):
    """The arguments of a call on whole samples: leaves that require gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: RelativeBias | None
    cotangent: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        tables = [] if self.bias is None else [self.bias.position_table, self.bias.time_table]
        return [self.q, self.k, self.v, *tables]


@dataclass(frozen=True)
class Record:
    """One entry of `record.json`."""

    op: str
    backend: str
    shape: str
    # "pass" in the file, which is a keyword of Python.
    direction: str
    ms: float | None
    tflops: float | None
    peak_mb: float | None
    ok: bool
    commit: str


def make_inputs(case: Case, layout: SequenceLayout, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Make random inputs on the layout's device, with minutes to days between the events of a history."""
    device = layout.device
    generator = torch.Generator(device).manual_seed(seed)  # on a CPU it would take longer than what is timed

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    tensors = [normal(layout.total_len, case.heads, case.dim) for _ in range(4)]
    bias = None
    if case.biased:
        gaps = torch.rand(layout.total_len, generator=generator, device=device, dtype=torch.float64)
        times = 1_700_000_000 + gaps.mul(11).exp().cumsum(0).to(torch.int64)
        following = torch.cat([times[1:], times[-1:] + 60])
        tables = [torch.randn(case.heads, size, generator=generator, device=device) for size in (2048, 64)]
        bias = RelativeBias(*(table.requires_grad_() for table in tables), times, following)
    q, k, v = (tensor.requires_grad_() for tensor in tensors[:3])
    return Inputs(q, k, v, bias, tensors[3])


def new_rows(case: Case, layout: SequenceLayout) -> Tensor:
    """Return which tokens of whole samples are not in the cache, bool [T]; all without a cache."""
    if case.num_cached is None:
        return torch.ones(layout.total_len, dtype=torch.bool, device=layout.device)
    first = case.num_cached.to(layout.device)
    return layout.positions() >= torch.repeat_interleave(first, layout.lengths, output_size=layout.total_len)


def cut(case: Case, inputs: Inputs, layout: SequenceLayout) -> CachedInputs:
    """Cut the inputs into a cache and new tokens."""
    if case.num_cached is None:
        raise ValueError(f"{case.shape} has no cache")
    new, q, k, v, bias = new_rows(case, layout), *(t.detach() for t in inputs[:3]), inputs.bias
    targets = torch.full_like(case.lengths, case.num_targets)
    layouts = (
        SequenceLayout(case.lengths - case.num_cached, targets),
        SequenceLayout(case.num_cached, None, case.num_contextual),
    )
    new_layout, cached = (part.to(layout.device) for part in layouts)
    if bias is not None:
        tables = (bias.position_table.detach(), bias.time_table.detach())
        of_new = RelativeBias(*tables, bias.timestamps[new], bias.next_timestamps[new])
        bias = of_new.with_cache(bias.timestamps[~new])
    return CachedInputs((q[new], k[new], v[new], new_layout, k[~new], v[~new], cached), bias)


def attend(case: Case, inputs: Inputs | CachedInputs, layout: SequenceLayout, backend: str) -> Tensor:
    """Run one forward pass, on whole samples or on the new tokens."""
    if isinstance(inputs, CachedInputs):
        scale_len, bias = float(case.lengths.max()), inputs.bias
        return hstu_attention_cached(
            *inputs.arguments, case.mask, scale_len=scale_len, bias=bias, backend=backend
        )
    return hstu_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        layout,
        case.mask,
        scale_len=float(case.lengths.max()),
        bias=inputs.bias,
        backend=backend,
        deterministic=case.deterministic,
    )


def results_of(
    case: Case, inputs: Inputs | CachedInputs, layout: SequenceLayout, backend: str
) -> list[Tensor]:
    """Return the output and all gradients, if there are any, from the named backend and no other."""
    out, is_cached = attend(case, inputs, layout, backend), isinstance(inputs, CachedInputs)
    ran = last_backend(CACHED_OP if is_cached else OP)
    if ran != backend:
        raise RuntimeError(f"{backend} was asked for, {ran} ran")
    if isinstance(inputs, CachedInputs):
        return [out]
    return [out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.cotangent)]


def widest_error(case: Case, device: str, backend: str) -> float:
    """Return the largest error of the output and all gradients relative to the allowed one; above 1 is wrong.

    The allowed error is twice that of the reference in the same type, plus a little for other orders of sums.
    """
    total = case.lengths.cumsum(0)
    kept = max(1, int((total <= max(CHECKED_TOKENS, int(case.lengths[0]))).sum()))
    num_cached = None if case.num_cached is None else case.num_cached[:kept]
    small = replace(case, lengths=case.lengths[:kept], num_cached=num_cached)
    layout = small.layout().to(device)
    inputs = make_inputs(small, layout, seed=1)
    exact_bias = inputs.bias
    if inputs.bias is not None:
        tables = (inputs.bias.position_table, inputs.bias.time_table)
        exact_tables = [table.detach().double().requires_grad_() for table in tables]
        exact_bias = RelativeBias(*exact_tables, inputs.bias.timestamps, inputs.bias.next_timestamps)
    exact_qkv = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    exact = Inputs(*exact_qkv, exact_bias, inputs.cotangent.double())
    plain = replace(small, deterministic=False)  # the reference adds up with atomics
    theirs, want = (results_of(plain, given, layout, "reference") for given in (inputs, exact))
    if case.num_cached is None:
        ours = results_of(small, inputs, layout, backend)
    else:
        ours = results_of(small, cut(small, inputs, layout), layout, backend)
        theirs, want = ([results[0][new_rows(small, layout)]] for results in (theirs, want))
    worst = 0.0
    for got, reference, right in zip(ours, theirs, want, strict=True):
        norm = right.norm().clamp(min=1e-12)
        allowed = FACTOR * (reference.double() - right).norm() / norm + 1e-3
        error = (got.double() - right).norm() / norm / allowed
        worst = max(worst, float(error) if bool(error.isfinite()) else float("inf"))
    return worst


def median_ms(run: Callable[[int], object], device: str, repeats: int, warm: int = 3) -> float:
    """Return the median time of `run(i)` for i = 0, 1, ..., after `warm` calls that do not count."""
    for i in range(warm):
        run(i)
    if device != "cuda":
        measured = []
        for i in range(repeats):
            start = time.perf_counter()
            run(i)
            measured.append((time.perf_counter() - start) * 1e3)
        return statistics.median(measured)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for i, (start_event, end_event) in enumerate(events):
        start_event.record()
        run(i)
        end_event.record()
    torch.cuda.synchronize()
    return statistics.median(start_event.elapsed_time(end_event) for start_event, end_event in events)


def missing(case: Case, device: str, backend: str) -> str:
    """Return why the backend cannot run the case; empty if it can."""
    small = replace(
        case, lengths=case.lengths[:1], num_cached=None if case.num_cached is None else case.num_cached[:1]
    )
    layout = small.layout().to(device)
    inputs = make_inputs(small, layout, seed=0)
    options = {"scale_len": 1.0, "bias": inputs.bias}
    if case.num_cached is None:
        answers = explain(OP, inputs.q, inputs.k, inputs.v, layout, case.mask, **options)
    else:
        given = cut(small, inputs, layout)
        answers = explain(CACHED_OP, *given.arguments, case.mask, **{**options, "bias": given.bias})
    support = dict(answers.rows).get(backend)
    if support is None:
        return f"{case.op} has no such backend"
    return "" if support.ok else support.reason


class Answer(NamedTuple):
    """The outcome of comparing one case and backend, before it is timed."""

    missing: str = ""  # why the backend cannot run it
    error: float = 0.0  # relative to the allowed one
    failure: str = ""


def compared(case: Case, device: str, backend: str) -> Answer:
    """Find out if the backend can run the case, and how far off it is."""
    if reason := missing(case, device, backend):
        return Answer(reason)
    try:
        return Answer(error=widest_error(case, device, backend))
    except (RuntimeError, ValueError) as failure:
        return Answer(error=float("inf"), failure=f"{type(failure).__name__}: {failure}")


def _share_lock(lock: Lock) -> None:
    global _long
    _long = lock
    torch.set_num_threads(1)


def _compared_apart(case: Case, device: str, backend: str) -> Answer:
    """Run `compared` in one of several processes that share a GPU."""
    if _long is None or int(case.lengths[0]) < LONG:
        return compared(case, device, backend)
    with _long:
        answer = compared(case, device, backend)
        if device == "cuda":
            torch.cuda.empty_cache()
        return answer


def compare_all(jobs: Sequence[tuple[Case, str]], device: str, workers: int) -> list[Answer]:
    """Run `compared` for all cases; several workers have processes of their own, which leave their compiled
    kernels on the disk."""
    if workers < 2:
        return [compared(case, device, backend) for case, backend in jobs]

    def code(job: tuple[Case, str]) -> Hashable:  # about what kernels are compiled for
        case, backend = job
        return backend, case.op, case.dim, case.mask, case.biased, case.deterministic

    # Several processes must not compile the same kernels at the same time.
    kinds = [code(job) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda i: kinds.index(kinds[i]) != i)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_share_lock, initargs=(context.Lock(),)) as pool:
        futures = {i: pool.submit(_compared_apart, jobs[i][0], device, jobs[i][1]) for i in order}
        return [futures[i].result() for i in range(len(jobs))]


def bench(case: Case, device: str, backend: str, commit: str, repeats: int, answer: Answer) -> list[Record]:
    """Return a record for each pass, forward and backward; without times if the case is wrong."""
    if not answer.error <= 1:
        reason = answer.failure or f"{answer.error:.2f} times the allowed error"
        print(f"{case.shape}: {reason}", file=sys.stderr)
        return [
            Record(case.op, backend, case.shape, direction, None, None, None, False, commit)
            for direction in case.directions
        ]
    layout = case.layout().to(device)
    sets = [make_inputs(case, layout, seed) for seed in range(INPUT_SETS)]
    if case.num_cached is None:
        given, outs = sets, [attend(case, inputs, layout, backend) for inputs in sets]
    else:
        given, outs, sets = [cut(case, inputs, layout) for inputs in sets], [], []

    def forward(i: int) -> None:
        with torch.no_grad():
            attend(case, given[i % INPUT_SETS], layout, backend)

    def backward(i: int) -> None:
        inputs = sets[i % INPUT_SETS]
        torch.autograd.grad(outs[i % INPUT_SETS], inputs.leaves, inputs.cotangent, retain_graph=True)

    flop, records = useful_flop(case), []
    for direction in case.directions:
        run, work = (forward, flop) if direction == "fwd" else (backward, BACKWARD_FLOP * flop)
        before = 0
        if device == "cuda":
            torch.cuda.synchronize()
            time.sleep(REST)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        ms = median_ms(run, device, repeats)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else None
        records.append(
            Record(case.op, backend, case.shape, direction, ms, work / ms / 1e9, peak, True, commit)
        )
    return records


def table(records: Sequence[Record]) -> str:
    """Format one line per record."""
    width = max((len(record.shape) for record in records), default=5)
    lines = [f"{'shape':<{width}}  backend    pass        ms  TFLOP/s  peak MB  ok"]
    for record in records:
        numbers = "".join(
            f"{'-' if value is None else format(value, f'.{digits}f'):>9}"
            for value, digits in ((record.ms, 3), (record.tflops, 0), (record.peak_mb, 0))
        )
        ok = "yes" if record.ok else "NO"
        lines.append(f"{record.shape:<{width}}  {record.backend:<9}  {record.direction} {numbers}  {ok}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measures the speed of attention, after checking its results."
    )
    parser.add_argument(
        "--backend", action="append", help="may be repeated; default on CUDA: sm90 and triton"
    )
    parser.add_argument(
        "--case", action="append", help="only cases whose name contains this; may be repeated"
    )
    parser.add_argument("--record", type=Path, help="where to write the list of records")
    parser.add_argument("--quick", action="store_true", help="run four cases only")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--workers", type=int, help="number of processes that compile and compare")
    parser.add_argument("--commit", help="commit to record, for machines without git")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = cases(options.quick) if device == "cuda" else tiny_cases()
    if options.case:
        chosen = [case for case in chosen if any(name in case.shape for name in options.case)]
    backends = options.backend or (["sm90", "triton"] if device == "cuda" else ["reference"])
    workers = options.workers
    if workers is None:
        workers = min(MOST_WORKERS, os.cpu_count() or 1) if device == "cuda" else 1
    jobs = list(itertools.product(chosen, backends))
    commit = options.commit or bench_records.current_commit()
    records: list[Record] = []
    for (case, backend), answer in zip(jobs, compare_all(jobs, device, workers), strict=True):
        if answer.missing:
            print(f"{case.shape}: {backend} is skipped: {answer.missing}", flush=True)
            continue
        made = bench(case, device, backend, commit, options.repeats, answer)
        print(table(made).split("\n", 1)[1], flush=True)
        records += made
        bench_records.write(options.record, records)  # after each case: a time limit may end this process
    if not records:
        print("no case was measured", file=sys.stderr)
        return 1
    print("\n" + table(records))
    return 0 if all(record.ok for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
