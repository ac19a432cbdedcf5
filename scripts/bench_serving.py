#!/usr/bin/env python3
"""Measures the speed of scoring many candidates on long histories, with and without a cache.

    python scripts/bench_serving.py [--history 4096] [--candidates 2048] [--microbatch 256] [--rows 8]
    python scripts/bench_serving.py --config configs/ml_1m_ranking.config [--set PATH=VALUE ...]

The model is that of a ranking config (default: bench_step.config beside this file), with its stack in the
variants of bench_step.py. Id features become hashes, so no data is needed. Each of --rows rows has
--history generated events and --candidates candidates. These ways are timed in turn, from a batch on the
device to scores on the device:

  uncached   pieces of --microbatch candidates of each row, each piece with the whole history
  one pass   all candidates in one call, with the memory that this takes
  prefill    the keys and values of users and histories, once
  cached     prefill, then pieces of --microbatch candidates of each row against the cache
  pieces     cached without the prefill: the cache exists already

Each call is waited for. Uncached, cached and pieces are also timed for several calls in a row, as a server
with a queue runs them: the host prepares a batch while the device works on the one before.

`ratio` is uncached over cached, `ratio_of_pieces` uncached over pieces, both in a row (marked `*`), and
`ratio_alone` is uncached over cached with each call waited for; all are medians over pairs. The scores are
compared first. On rows of at most 512 events, the error of cached scores against the reference backend in
float32 may be twice that of uncached scores. At full size, in float32, they may differ from uncached scores
by 1e-5. `--record` writes a list with one entry per variant.

The script runs on CUDA if available. The exit code is 1 if a variant is wrong or does not fit into memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import environment
from recsys import protos as pb
from recsys.errors import RecsysError
from recsys.flags import Parser, positive
from scripts import bench_records
from scripts.serving_ways import Scoring
from scripts.step_variants import VARIANTS, Shape, variant_of

FACTOR = 2.0
"""Largest allowed error of cached scoring relative to that of uncached scoring."""

CLOSE = 1e-5
"""Largest allowed difference |a - b| / max(1, |b|) of cached and uncached scores in float32."""

QUEUED, IN_A_ROW, CALLS = ("uncached", "cached", "pieces"), "*", 4
"""Ways that are also timed in a row, the suffix of these times, and the number of calls in a row."""

CHECKED_EVENTS = 512
"""Longest history of the rows that are compared with float32."""


@dataclass(frozen=True)
class Record:
    """The results of a variant; None if a value is unknown.

    Attributes:
        uncached_ms, one_pass_ms, prefill_ms, cached_ms, pieces_ms: medians.
        uncached_in_a_row_ms, cached_in_a_row_ms, pieces_in_a_row_ms: medians per call, several in a row.
        ratio: uncached over cached, in a row.
        ratio_of_pieces: uncached over pieces, in a row.
        ratio_alone: uncached over cached.
        candidates_per_second: cached, in a row.
        cache_mb: MiB of the cache of all rows.
        difference: largest |cached - uncached| / max(1, |uncached|) at full size.
    """

    variant: str
    backend: str
    device: str
    precision: str
    rows: int
    history: int
    candidates: int
    microbatch: int
    num_layers: int
    embedding_dim: int
    uncached_ms: float | None
    one_pass_ms: float | None
    prefill_ms: float | None
    cached_ms: float | None
    pieces_ms: float | None
    uncached_in_a_row_ms: float | None
    cached_in_a_row_ms: float | None
    pieces_in_a_row_ms: float | None
    ratio: float | None
    ratio_of_pieces: float | None
    ratio_alone: float | None
    candidates_per_second: float | None
    cache_mb: float | None
    difference: float | None
    ok: bool
    commit: str


def error_of(base: pb.Pipeline, name: str, shape: Shape, microbatch: int, device: torch.device) -> float:
    """Returns the largest error of cached scores relative to the allowed one; above 1 is wrong."""
    short = replace(shape, history=min(shape.history, CHECKED_EVENTS), batch=2)
    pipeline = variant_of(base, name, short)
    exact = variant_of(base, name, replace(short, backend="reference"))
    exact.model.precision = pb.FP32
    right = Scoring(exact, microbatch, device).one_pass()
    scoring = Scoring(pipeline, microbatch, device)
    uncached = (scoring.uncached() - right).abs().max()
    allowed = FACTOR * uncached + CLOSE * right.abs().max().clamp(min=1)
    wrong = [(scores - right).abs().max() for scores in _with_a_cache(scoring)]
    error = float(torch.stack(wrong).max() / allowed)
    return error if error == error else float("inf")


def difference_of(scoring: Scoring) -> float:
    """Returns the largest difference between cached and uncached scores at full size."""
    uncached = scoring.uncached()
    far = [
        ((scores - uncached).abs() / uncached.abs().clamp(min=1)).max() for scores in _with_a_cache(scoring)
    ]
    return float(torch.stack(far).max())


def _with_a_cache(scoring: Scoring) -> list[Tensor]:
    """Returns scores with a new cache, and with an existing one."""
    return [scoring.cached(), scoring.pieces()]


def build(
    base: pb.Pipeline, name: str, shape: Shape, microbatch: int, device: torch.device
) -> tuple[Scoring, float] | None:
    """Builds a variant for timing and returns it with its difference; returns None, with a line on stderr, if
    it is wrong or too large.
    """
    try:
        error = error_of(base, name, shape, microbatch, device)
        if not error <= 1:
            print(f"{name}: {error:.2f} times the allowed error", file=sys.stderr)
            return None
        pipeline = variant_of(base, name, shape)
        scoring = Scoring(pipeline, microbatch, device)
        difference = difference_of(scoring)
        if pipeline.model.precision == pb.FP32 and not difference <= CLOSE:
            print(f"{name}: cached and uncached scores differ by {difference:.1e}", file=sys.stderr)
            return None
        return scoring, difference
    except torch.OutOfMemoryError as full:
        print(f"{name}: {str(full).splitlines()[0]}", file=sys.stderr)
    return None


def times_of(scoring: Scoring, repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Measures milliseconds of each way in turn; with the suffix `IN_A_ROW`, per call of several in a row."""
    ways = ("uncached", "one_pass", "prefill", "cached", "pieces")
    times: dict[str, list[float]] = {way: [] for way in ways}
    times |= {way + IN_A_ROW: [] for way in QUEUED}
    for _ in range(repeats):
        for way in ways:
            times[way].append(_milliseconds(getattr(scoring, way), device))
        for way in QUEUED:
            times[way + IN_A_ROW].append(_milliseconds(getattr(scoring, way), device, CALLS))
    return times


def _milliseconds(call: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Times `count` calls in a row and returns the milliseconds of each."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return 1e3 * (time.perf_counter() - start) / count


def record_of(
    name: str,
    scoring: Scoring | None,
    difference: float | None,
    times: dict[str, list[float]],
    pipeline: pb.Pipeline,
    shape: Shape,
    microbatch: int,
    commit: str,
) -> Record:
    """Collects the results of a variant."""
    stacks = [entry.hstu for entry in pipeline.model.ranker.mixer.mixture.stacks]
    stack = (stacks or [pipeline.model.ranker.mixer.hstu])[0]
    middle = {way: statistics.median(way_times) for way, way_times in times.items()}

    def ratio(way: str, suffix: str = IN_A_ROW) -> float | None:
        pairs = zip(times.get("uncached" + suffix, ()), times.get(way + suffix, ()), strict=True)
        return statistics.median(slow / way_times for slow, way_times in pairs) if times else None

    total = shape.batch * shape.candidates
    return Record(
        variant=name,
        backend=shape.backend,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        precision=pb.Precision.Name(pipeline.model.precision).lower(),
        rows=shape.batch,
        history=shape.history,
        candidates=shape.candidates,
        microbatch=microbatch,
        num_layers=sum(group.num_layers for group in stack.layer_groups),
        embedding_dim=pipeline.model.embedding_dim,
        uncached_ms=middle.get("uncached"),
        one_pass_ms=middle.get("one_pass"),
        prefill_ms=middle.get("prefill"),
        cached_ms=middle.get("cached"),
        pieces_ms=middle.get("pieces"),
        uncached_in_a_row_ms=middle.get("uncached" + IN_A_ROW),
        cached_in_a_row_ms=middle.get("cached" + IN_A_ROW),
        pieces_in_a_row_ms=middle.get("pieces" + IN_A_ROW),
        ratio=ratio("cached"),
        ratio_of_pieces=ratio("pieces"),
        ratio_alone=ratio("cached", ""),
        candidates_per_second=1e3 * total / middle["cached" + IN_A_ROW] if times else None,
        cache_mb=scoring.cached_model.prefill(scoring.batch).num_bytes / 2**20 if scoring else None,
        difference=difference,
        ok=scoring is not None,
        commit=commit,
    )


def table(records: Sequence[Record]) -> str:
    """Formats one line per variant."""
    columns = {
        "uncached_ms": ",.1f",
        "one_pass_ms": ",.1f",
        "prefill_ms": ",.1f",
        "cached_ms": ",.1f",
        "pieces_ms": ",.1f",
        "uncached_in_a_row_ms": ",.1f",
        "cached_in_a_row_ms": ",.1f",
        "pieces_in_a_row_ms": ",.1f",
        "ratio": ".2f",
        "ratio_of_pieces": ".2f",
        "ratio_alone": ".2f",
        "candidates_per_second": ",.0f",
        "cache_mb": ",.1f",
        "difference": ".1e",
    }
    heads = [name.split("_per")[0].replace("ratio_of_", "of_").replace("_in_a_row", "*") for name in columns]
    width = max(len(record.variant) for record in records)
    lines = [f"{'':<{width}}" + "".join(f"{head:>13}" for head in heads)]
    for record in records:
        cells = [(getattr(record, name), form) for name, form in columns.items()]
        numbers = "".join(f"{'-' if value is None else format(value, form):>13}" for value, form in cells)
        lines.append(f"{record.variant:<{width}}{numbers}{'' if record.ok else '  FAILED'}")
    return "\n".join(lines)


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the variants; see the head of this file."""
    options = _options(arguments)
    environment.import_torchrec_quietly()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = options.backend or ("auto" if device.type == "cuda" else "reference")
    shape = Shape(
        options.history,
        options.rows,
        options.candidates,
        options.window,
        options.prefix,
        options.tail,
        None,
        backend,
    )
    commit, records = options.commit or bench_records.current_commit(), []
    try:
        base = config.load(options.config, options.overrides)
        for name in dict.fromkeys(options.variant or ("full", "semi-local truncation")):
            pipeline = variant_of(base, name, shape)
            scoring, difference = build(base, name, shape, options.microbatch, device) or (None, None)
            times = times_of(scoring, options.repeats, device) if scoring else {}
            records.append(
                record_of(name, scoring, difference, times, pipeline, shape, options.microbatch, commit)
            )
    except RecsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    print(
        f"{device.type}, {backend}, {records[0].precision}, {records[0].num_layers} layers of width "
        f"{records[0].embedding_dim}, {shape.batch} rows of {shape.history:,} events and "
        f"{shape.candidates:,} candidates, {options.microbatch} at a time"
    )
    print(table(records))
    bench_records.write(options.record, records)
    return 0 if all(record.ok for record in records) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = Path(__file__).with_name("bench_step.config")
    parser.add_argument("--config", type=Path, default=default)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    for name, value, meaning in (
        ("history", 4096, "number of events of each row"),
        ("rows", 8, "number of rows that are scored together"),
        ("candidates", 2048, "number of candidates of each row"),
        ("microbatch", 256, "number of candidates of each row that are scored together"),
        ("window", 256, "window of a history token, in events"),
        ("prefix", 64, "number of oldest events that stay visible"),
        ("tail", 1024, "number of newest events that a truncation keeps"),
        ("repeats", 10, "number of measurements of each way"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=value, help=f"{meaning}; default: {value}")
    parser.add_argument("--backend", help="attention backend; default: auto on CUDA, else reference")
    parser.add_argument("--variant", action="append", choices=[*VARIANTS], help="repeatable")
    parser.add_argument("--record", type=Path, help="file to which the results are written")
    parser.add_argument("--commit", help="commit to record, for machines without git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
