#!/usr/bin/env python3
"""Measures the speed of the ops that move rows on a GPU; each case is checked before it is timed.

    python scripts/bench_jagged.py [--backend triton] [--tokens 262144] [--case NAME ...] [--record FILE]

The cases are the first steps of a model on a training batch: tokens are assembled from their parts
(`assemble`, one map over 3 or 4 sources), channels are selected (`channels`, two maps over the same rows),
the history is truncated (`truncate`), and positions and ages are added (`embed`; in `embed hot`, 80 % of
the ages are equal). Each backend is compared with PyTorch: `cat`, `index_select`, `embedding` and their
gradients. TB/s count the bytes that must be read and written once.

The error of a case from float64 may be twice that of PyTorch; rows that are only moved must be equal.
`--record` writes a list of `{op, backend, shape, pass, ms, tb_s, host_us, ok, commit}`: `ms` is the time of
the device with the host far ahead of it, `host_us` the time of the host alone. On a CPU, tiny shapes test
the script itself. The exit code is 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys.ops import SequenceLayout, bucket_embedding, gather_rows  # noqa: E402
from scripts import bench_records  # noqa: E402
from scripts.bench_ops import FACTOR, median_ms  # noqa: E402

SAMPLES, CONTEXTUAL, TARGETS = 32, 4, 16
"""Samples of a batch; contextual tokens and targets per sample."""

AHEAD = 8_000_000
"""Cycles, about 4 ms, in which the device waits for the host to get ahead."""

AGES = 65
"""Rows of the time table: 64, and one for contextual tokens."""

Way = Callable[..., Tensor]


class Case(NamedTuple):
    """One op on one batch. Both ways take `leaves` and return the output.

    Attributes:
        moved: bytes that forward and backward each read and write at least.
    """

    op: str
    name: str
    ours: Way
    theirs: Way
    leaves: list[Tensor]
    moved: tuple[int, int]


@dataclass(frozen=True)
class Record:
    """One entry of the record."""

    op: str
    backend: str
    shape: str
    direction: str  # "pass" in the file, which is a keyword of Python
    ms: float | None
    tb_s: float | None
    host_us: float | None
    ok: bool
    commit: str


def layout_of(tokens: int, device: str) -> SequenceLayout:
    """Return a layout of about `tokens` tokens in samples of different lengths."""
    mean = max(1, tokens // SAMPLES - CONTEXTUAL - TARGETS)
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(mean // 2, mean * 3 // 2 + 1, (SAMPLES,), generator=generator)
    targets = torch.full((SAMPLES,), TARGETS)
    return SequenceLayout(history + CONTEXTUAL + targets, targets, CONTEXTUAL).to(device)


def leaf(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(rows, width, device=device).to(dtype).requires_grad_()


def cases(tokens: int, width: int, dtype: torch.dtype, device: str, backend: str) -> list[Case]:
    """Return all cases for one width and type."""
    layout, row = layout_of(tokens, device), width * dtype.itemsize
    events = layout.total_len - SAMPLES * (CONTEXTUAL + TARGETS)
    cases = []
    for sources in (3, 4):
        sizes = [SAMPLES * CONTEXTUAL, *_parts(events, sources - 2), SAMPLES * TARGETS]
        index, inverse = layout.assemble_index(), layout.disassemble_index()
        cases.append(
            Case(
                "gather_rows",
                f"assemble {sources} sources",
                lambda *leaves, index=index, inverse=inverse: gather_rows(
                    leaves, index, inverse, backend=backend
                ),
                lambda *leaves, index=index: torch.cat(leaves).index_select(0, index),
                [leaf(size, width, dtype, device) for size in sizes],
                (2 * layout.total_len * row,) * 2,
            )
        )
    cases += [
        _channels(layout, width, dtype, device, backend),
        _truncate(layout, width, dtype, device, backend),
    ]
    if dtype == torch.float32:
        cases += [_embed(layout, width, hot, device, backend) for hot in (0.0, 0.8)]
    return cases


def _parts(total: int, count: int) -> list[int]:
    return [total // count + (number < total % count) for number in range(count)]


def _channels(layout: SequenceLayout, width: int, dtype: torch.dtype, device: str, backend: str) -> Case:
    """Make two channels with two thirds of the tokens each: one third is in both."""
    total = layout.total_len
    rows_of_x = torch.arange(total, device=device)
    maps = [rows_of_x[rows_of_x % 3 != skipped] for skipped in (0, 1)]
    rows = sum(len(index) for index in maps)
    return Case(
        "gather_rows",
        "channels",
        lambda x: gather_rows(x, maps, backend=backend),
        lambda x: torch.cat([x.index_select(0, index) for index in maps]),
        [leaf(total, width, dtype, device)],
        (2 * rows * width * dtype.itemsize, (rows + total) * width * dtype.itemsize),
    )


def _truncate(layout: SequenceLayout, width: int, dtype: torch.dtype, device: str, backend: str) -> Case:
    kept, index = layout.truncate(layout.max_len // 4)
    row = width * dtype.itemsize
    return Case(
        "gather_rows",
        "truncate",
        lambda x: gather_rows(x, index, backend=backend),
        lambda x: x.index_select(0, index),
        [leaf(layout.total_len, width, dtype, device)],
        (2 * kept.total_len * row, (kept.total_len + layout.total_len) * row),
    )


def _embed(layout: SequenceLayout, width: int, hot: float, device: str, backend: str) -> Case:
    """Make positions up to the longest sample, and ages, of which a share may be equal."""
    total = layout.total_len
    chance = torch.rand(total, device=device)
    ages = (torch.rand(total, device=device) ** 3 * AGES).long()
    buckets = [layout.positions(), torch.where(chance < hot, 3, ages)]
    scale = width**0.5

    def plain(x: Tensor, *tables: Tensor) -> Tensor:
        return sum(
            (F.embedding(positions, table) for positions, table in zip(buckets, tables, strict=True)),
            x * scale,
        )

    return Case(
        "bucket_embedding",
        f"embed{' hot' if hot else ''}",
        lambda x, *tables: bucket_embedding(x, tables, buckets, scale=scale, backend=backend),
        plain,
        [leaf(rows, width, torch.float32, device) for rows in (total, layout.max_len, AGES)],
        (2 * total * width * 4, 2 * total * width * 4),
    )


def error_of(case: Case) -> float:
    """Return the error of the output and all gradients relative to the allowed one; above 1 is wrong."""
    results = []
    wide = [leaf.detach().double().requires_grad_() for leaf in case.leaves]
    for way, leaves in ((case.ours, case.leaves), (case.theirs, case.leaves), (case.theirs, wide)):
        out = way(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
        cotangent = cotangent.to(case.leaves[0].dtype).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent)])
    worst = 0.0
    for got, reference, right in zip(*results, strict=True):
        for size in (torch.linalg.vector_norm, lambda difference: difference.abs().max()):
            allowed = FACTOR * size(reference.double() - right) + 1e-7 * size(right) + 1e-30
            error = float(size(got.double() - right) / allowed)
            worst = max(worst, error if error == error else float("inf"))
    return worst


def bench(make: Callable[[int], Case], tokens: int, shape: str, context: Context) -> list[Record]:
    """Return records of the backend and of PyTorch, without times if the case is wrong.

    Args:
        make: makes a case with the given number of tokens.
    """
    small = make(min(tokens, 8192))
    shape = f"{small.name} {shape}"
    try:
        error = error_of(small)
    except (RuntimeError, ValueError) as failure:
        print(f"{shape}: {type(failure).__name__}: {failure}", file=sys.stderr)
        error = float("inf")
    if not error <= 1:
        print(f"{shape}: {error:.2f} times the allowed error", file=sys.stderr)
        return [Record(small.op, context.backend, shape, "fwd", None, None, None, False, context.commit)]
    case, records = make(tokens), []
    for name, way in ((context.backend, case.ours), ("PyTorch", case.theirs)):
        for direction, run, moved in zip(("fwd", "bwd"), passes(case, way), case.moved, strict=True):
            ms, host = measure(run, context)
            made = Record(case.op, name, shape, direction, ms, moved / ms / 1e9, host, True, context.commit)
            records.append(made)
    return records


class Context(NamedTuple):
    """Settings that all cases share."""

    device: str
    backend: str
    commit: str
    repeats: int


def measure(run: Callable[[int], object], context: Context) -> tuple[float, float]:
    """Return the median ms on the device and the median microseconds on the host."""
    if context.device != "cuda":
        ms = median_ms(run, context.device, context.repeats)
        return ms, 1e3 * ms
    for number in range(3):
        run(number)
    timings = []
    for number in range(context.repeats):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)
        first.record()
        start = time.perf_counter()
        run(number)
        host = time.perf_counter() - start
        last.record()
        torch.cuda.synchronize()
        timings.append((first.elapsed_time(last), 1e6 * host))
    return statistics.median(ms for ms, _ in timings), statistics.median(host for _, host in timings)


def passes(case: Case, way: Way) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Return functions that run the forward pass alone and the backward pass alone."""
    out = way(*case.leaves)
    cotangent = torch.randn_like(out)

    def forward(_: int) -> None:
        with torch.no_grad():
            way(*case.leaves)

    def backward(_: int) -> None:
        torch.autograd.grad(out, case.leaves, cotangent, retain_graph=True)

    return forward, backward


def table(records: Sequence[Record]) -> str:
    """Format one line per record."""
    lines = []
    for record in records:
        numbers = "".join(
            f"{'-' if value is None else format(value, f'.{digits}f'):>9}"
            for value, digits in ((record.ms, 3), (record.tb_s, 2), (record.host_us, 0))
        )
        ok = "" if record.ok else "  WRONG"
        lines.append(f"{record.shape:<40} {record.backend:<10} {record.direction:<4}{numbers}{ok}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measures the speed of the ops that move rows, after checking their results."
    )
    parser.add_argument("--backend", default="triton" if torch.cuda.is_available() else "reference")
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--case", action="append", help="only shapes that contain this; may be repeated")
    parser.add_argument("--record", type=Path, help="where to write the list of records")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="commit to record, for machines without git")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = [(256, torch.float32), (512, torch.float32), (256, torch.bfloat16)]
    tokens = options.tokens
    if device == "cpu":
        kinds, tokens = [(8, torch.float32), (8, torch.bfloat16)], 2048
    commit = options.commit or bench_records.current_commit()
    context = Context(device, options.backend, commit, options.repeats)
    print(f"{'shape':<40} {'way':<10} {'pass':<4}{'ms':>9}{'TB/s':>9}{'host us':>9}")
    records: list[Record] = []
    for width, dtype in kinds:
        torch.manual_seed(0)
        shape = f"T{tokens} E{width} {str(dtype).removeprefix('torch.')}"
        names = [case.name for case in cases(64, width, dtype, device, options.backend)]
        for number, name in enumerate(names):
            if options.case and not any(wanted in f"{name} {shape}" for wanted in options.case):
                continue
            made = bench(
                lambda size, kind=(width, dtype), place=number: cases(size, *kind, device, options.backend)[
                    place
                ],
                tokens,
                shape,
                context,
            )
            print(table(made), flush=True)
            records += made
    bench_records.write(options.record, records)
    return 0 if all(record.ok for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
