#!/usr/bin/env python3
"""Speed of `hstu_attention` on a GPU, and only of what is right: each case is compared before it is timed.

    python scripts/bench_ops.py [--backend triton] [--case NAME ...] [--record FILE] [--quick]

A case runs its backend in bfloat16 against float64 on the same inputs, for some samples of the batch, output
and all gradients; it may be twice as far off as the reference backend in bfloat16. Then it is timed over
several sets of inputs with CUDA events (medians): `fwd`, and `bwd` alone. Useful FLOP are those of visible
pairs: 2 (D + V) a pair and head forward, 2.5 times that backward. `--record` writes a list of
`{op, backend, shape, pass, ms, tflops, peak_mb, ok, commit}`; a case that is wrong has no time.

On a CPU it runs tiny shapes, to test itself. Exit code 1 when a case was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention, last_backend  # noqa: E402
from recsys.ops.mask import key_intervals  # noqa: E402

OP = "hstu_attention"
CAUSAL = AttentionMask()
BACKWARD_FLOP = 2.5
"""Times those of the forward: five products instead of two."""

FACTOR = 2.0
"""How many times the reference's error in bfloat16 a backend may have."""

CHECKED_TOKENS = 4096
"""About how many tokens of a case are compared, in whole samples: a float64 score for each pair."""

INPUT_SETS = 3
"""Timed in turn, so that the caches do not hold the operands."""


@dataclass(frozen=True)
class Case:
    """One shape. `shape` is its name in records."""

    shape: str
    lengths: Tensor  # int64 [B], on the host
    dim: int
    heads: int = 4
    num_targets: int = 0
    num_contextual: int = 0
    mask: AttentionMask = CAUSAL
    biased: bool = False
    deterministic: bool = False

    def layout(self) -> SequenceLayout:
        """On the host. Samples have `num_targets` targets each."""
        return SequenceLayout(
            self.lengths, torch.full_like(self.lengths, self.num_targets), self.num_contextual
        )


class Inputs(NamedTuple):
    """Everything that a call takes; leaves that require gradients."""

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
    """One line of `record.json`."""

    op: str
    backend: str
    shape: str
    # "pass" in the file: a word that Python keeps for itself.
    direction: str
    ms: float | None
    tflops: float | None
    peak_mb: float | None
    ok: bool
    commit: str

    def as_json(self) -> dict[str, object]:
        fields = asdict(self)
        return {("pass" if name == "direction" else name): value for name, value in fields.items()}


def cases(quick: bool = False) -> list[Case]:
    """The shapes of the published table, then those with bias, windows, targets and determinism."""
    equal = [
        (128, 1024, 128),
        (32, 4096, 128),
        (8, 16384, 128),
        (64, 4096, 64),
        (32, 2048, 256),
        (1024, 256, 64),
    ]
    found = [
        Case(f"B{batch} L{length} D{dim}", torch.full((batch,), length), dim) for batch, length, dim in equal
    ]
    generator = torch.Generator().manual_seed(0)
    uniform = torch.randint(1, 4097, (64,), generator=generator)
    pareto = (16 / torch.rand(512, generator=generator).pow(1 / 1.16)).clamp(max=2048).to(torch.int64)
    found.append(Case("B64 uniform 1..4096 D128", uniform, 128))
    found.append(Case("B512 Pareto 16..2048 D128", pareto, 128))
    base = Case("B32 L2048 D64", torch.full((32,), 2048), 64)
    found += [base, replace(base, shape="B32 L2048 D64 bias", biased=True)]
    long = Case("B8 L16384 D128 window 512 prefix 64", torch.full((8,), 16384), 128)
    found.append(replace(long, mask=AttentionMask(window=512, prefix=64)))
    targets = replace(base, num_targets=256, num_contextual=6)
    found.append(replace(targets, shape="B32 L2048 D64 C6 targets 256"))
    groups = replace(targets, mask=AttentionMask(window=256, target_window=True, target_group_size=4))
    found.append(replace(groups, shape="B32 L2048 D64 C6 targets 256 groups 4 window 256"))
    found += [replace(case, shape=f"{case.shape} deterministic", deterministic=True) for case in found[:8]]
    return found[:2] + found[9:11] if quick else found


def tiny_cases() -> list[Case]:
    """For a machine without a GPU."""
    lengths = torch.tensor([5, 17, 40])
    bias = Case("tiny bias", lengths, 16, heads=2, num_targets=3, num_contextual=2, biased=True)
    return [Case("tiny", lengths, 16, heads=2), replace(bias, mask=AttentionMask(window=4, prefix=2))]


def useful_flop(case: Case) -> float:
    """Of the forward: two products over the pairs that the mask lets through."""
    lengths, counts = case.lengths.unique(return_counts=True)
    pairs = 0
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        one = SequenceLayout(torch.tensor([length]), torch.tensor([case.num_targets]), case.num_contextual)
        seen = key_intervals(case.mask, one)
        pairs += count * int((seen.end - seen.start).sum())
    return 2.0 * 2.0 * case.dim * case.heads * pairs


def make_inputs(case: Case, layout: SequenceLayout, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random inputs on the layout's device; times of a history that grows by minutes to days."""
    device, generator = layout.device, torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tensors = [normal(layout.total_len, case.heads, case.dim) for _ in range(4)]
    bias = None
    if case.biased:
        gaps = torch.rand(layout.total_len, generator=generator, dtype=torch.float64).mul(11).exp()
        times = 1_700_000_000 + gaps.cumsum(0).to(torch.int64).to(device)
        following = torch.cat([times[1:], times[-1:] + 60])
        tables = [torch.randn(case.heads, size, generator=generator).to(device) for size in (2048, 64)]
        bias = RelativeBias(*(table.requires_grad_() for table in tables), times, following)
    q, k, v = (tensor.requires_grad_() for tensor in tensors[:3])
    return Inputs(q, k, v, bias, tensors[3])


def attend(case: Case, inputs: Inputs, layout: SequenceLayout, backend: str) -> Tensor:
    """One forward."""
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


def widest_error(case: Case, device: str, backend: str) -> float:
    """The largest error, of the output and all gradients, relative to what is allowed; above 1 is wrong.

    The allowed one is that of the reference in the same type, twice, and a little for sums in another order.
    """
    total = case.lengths.cumsum(0)
    kept = max(1, int((total <= max(CHECKED_TOKENS, int(case.lengths[0]))).sum()))
    small = replace(case, lengths=case.lengths[:kept])
    layout = small.layout().to(device)
    inputs = make_inputs(small, layout, seed=1)
    exact_bias = inputs.bias
    if inputs.bias is not None:
        tables = (inputs.bias.position_table, inputs.bias.time_table)
        exact_tables = [table.detach().double().requires_grad_() for table in tables]
        exact_bias = RelativeBias(*exact_tables, inputs.bias.timestamps, inputs.bias.next_timestamps)
    exact_qkv = [tensor.detach().double().requires_grad_() for tensor in inputs[:3]]
    exact = Inputs(*exact_qkv, exact_bias, inputs.cotangent.double())
    results = []
    for given, name in ((inputs, backend), (inputs, "reference"), (exact, "reference")):
        out = attend(replace(small, deterministic=False), given, layout, name)
        if last_backend(OP) != name:
            raise RuntimeError(f"{name} was asked for, {last_backend(OP)} ran")
        results.append([out.detach(), *torch.autograd.grad(out, given.leaves, given.cotangent)])
    worst = 0.0
    for ours, theirs, want in zip(*results, strict=True):
        norm = want.norm().clamp(min=1e-12)
        allowed = FACTOR * (theirs.double() - want).norm() / norm + 1e-3
        error = (ours.double() - want).norm() / norm / allowed
        worst = max(worst, float(error) if bool(error.isfinite()) else float("inf"))
    return worst


def median_ms(run: Callable[[int], object], device: str, repeats: int) -> float:
    """Median time of `run(i)` for i = 0, 1, ..., after three calls that do not count."""
    for i in range(3):
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


def bench(case: Case, device: str, backend: str, commit: str, repeats: int) -> list[Record]:
    """A record for the forward and one for the backward; without times when the case is wrong."""
    try:
        error = widest_error(case, device, backend)
    except (RuntimeError, ValueError) as failure:
        print(f"{case.shape}: {type(failure).__name__}: {failure}", file=sys.stderr)
        error = float("inf")
    if not error <= 1:
        print(f"{case.shape}: {error:.2f} times the allowed error", file=sys.stderr)
        return [
            Record(OP, backend, case.shape, direction, None, None, None, False, commit)
            for direction in ("fwd", "bwd")
        ]
    layout = case.layout().to(device)
    sets = [make_inputs(case, layout, seed) for seed in range(INPUT_SETS)]
    outs = [attend(case, inputs, layout, backend) for inputs in sets]

    def forward(i: int) -> None:
        with torch.no_grad():
            attend(case, sets[i % INPUT_SETS], layout, backend)

    def backward(i: int) -> None:
        inputs = sets[i % INPUT_SETS]
        torch.autograd.grad(outs[i % INPUT_SETS], inputs.leaves, inputs.cotangent, retain_graph=True)

    flop, records = useful_flop(case), []
    for direction, run, work in (("fwd", forward, flop), ("bwd", backward, BACKWARD_FLOP * flop)):
        before = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        ms = median_ms(run, device, repeats)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else None
        records.append(Record(OP, backend, case.shape, direction, ms, work / ms / 1e9, peak, True, commit))
    return records


def current_commit() -> str:
    """Of the checkout; `unknown` where there is no git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def table(records: Sequence[Record]) -> str:
    """One line a record."""
    width = max((len(record.shape) for record in records), default=5)
    lines = [f"{'shape':<{width}}  pass        ms  TFLOP/s  peak MB  ok"]
    for record in records:
        numbers = "".join(
            f"{'-' if value is None else format(value, f'.{digits}f'):>9}"
            for value, digits in ((record.ms, 3), (record.tflops, 0), (record.peak_mb, 0))
        )
        lines.append(f"{record.shape:<{width}}  {record.direction} {numbers}  {'yes' if record.ok else 'NO'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Correctness-gated speed of hstu_attention.")
    parser.add_argument("--backend", default="triton" if torch.cuda.is_available() else "reference")
    parser.add_argument(
        "--case", action="append", help="only cases whose name contains this; may be repeated"
    )
    parser.add_argument("--record", type=Path, help="where to write the list of records")
    parser.add_argument("--quick", action="store_true", help="four cases")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", help="recorded instead of the checkout's, where git is not there")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = cases(options.quick) if device == "cuda" else tiny_cases()
    if options.case:
        chosen = [case for case in chosen if any(name in case.shape for name in options.case)]
    records: list[Record] = []
    for case in chosen:
        made = bench(case, device, options.backend, options.commit or current_commit(), options.repeats)
        print(table(made).split("\n", 1)[1], flush=True)
        records += made
        if options.record is not None:  # after each case: a time limit may end this process
            options.record.parent.mkdir(parents=True, exist_ok=True)
            options.record.write_text(json.dumps([record.as_json() for record in records], indent=1))
    print("\n" + table(records))
    return 0 if all(record.ok for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
