#!/usr/bin/env python3
"""Measures the speed of finding the best items of a catalogue, exactly and with indices of faiss.

    python scripts/bench_topk.py [--items 1000000] [--dim 64] [--queries 256] [--k 10] [--removed 50]
                                 [--dtype float32] [--backend auto --backend reference ...]
                                 [--index "HNSW32" --index "IVF4096,Flat nprobe=32" ...] [--record FILE]

Items are synthetic unit vectors around 1,000 centers, so that an index can find neighbors; queries lie
around the same centers. For each query, --removed random items must not be found. Exact search runs on CUDA
if available, with each --backend of `top_k`; an index runs on the CPU. --dtype is the type of the items.
The answers are checked first, in float64: a search that returns a wrong item, a removed item or a wrong
score is not timed. `recall` is the share of the exact answer that an index found.

The exit code is 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recsys import protos as pb
from recsys.flags import Parser, positive
from recsys.inference.search import Search, open_search
from recsys.ops import TopK, last_backend, top_k
from recsys.ops.top_k import OP
from scripts import bench_records

CENTRES = 1000
CHECKED = 16
"""Number of queries whose answers are compared with all scores in float64."""

CHECKED_ITEMS = 1 << 20
"""Number of items that are compared at a time."""

CLOSE = 1e-5
"""Largest difference of a score; scores of unit vectors are at most 1."""


@dataclass(frozen=True)
class Problem:
    """The catalogue [V, E], queries float32 [B, E], and the other arguments of `top_k`."""

    items: Tensor
    queries: Tensor
    removed: Tensor
    removed_lengths: Tensor
    k: int

    def gone(self) -> dict[str, Tensor]:
        """The removed items, as arguments of `top_k`."""
        return {"removed": self.removed, "removed_lengths": self.removed_lengths}

    @cached_property
    def scores(self) -> Tensor:
        """Scores of the first queries, float64 [CHECKED, V], -inf for removed items."""
        queries = self.queries[:CHECKED].double()
        scores = torch.cat([queries @ part.double().T for part in self.items.split(CHECKED_ITEMS)], dim=1)
        for row, gone in zip(scores, self.removed.split(self.removed_lengths.tolist()), strict=False):
            row[gone] = -torch.inf
        return scores


@dataclass(frozen=True)
class Record:
    """One line of the table: milliseconds, MiB beyond items and queries, seconds to build an index."""

    search: str
    backend: str | None
    device: str
    dtype: str
    items: int
    dim: int
    queries: int
    k: int
    milliseconds: float
    spread: float
    extra_mib: float | None
    build_s: float | None
    recall: float | None
    commit: str
    torch: str


def make(
    items: int, dim: int, queries: int, k: int, removed: int, dtype: torch.dtype = torch.float32
) -> Problem:
    """Makes a reproducible problem on the host; `dtype` is the type of the items."""
    draw = torch.Generator().manual_seed(1)
    centres = F.normalize(torch.randn(CENTRES, dim, generator=draw), dim=1)

    def around(count: int) -> Tensor:
        chosen = centres[torch.randint(CENTRES, (count,), generator=draw)]
        return F.normalize(chosen + torch.randn(count, dim, generator=draw) * (0.7 / dim**0.5), dim=1)

    gone = torch.randint(items, (queries * removed,), generator=draw)
    return Problem(around(items).to(dtype), around(queries), gone, torch.full((queries,), removed), k)


def fault(problem: Problem, answer: TopK, *, exact: bool) -> str | None:
    """Describes the first fault in the answers of the first queries; None if there is none."""
    for row, scores in enumerate(problem.scores):
        items, given = answer.items[row].cpu(), answer.scores[row].cpu().double()
        if items.unique().numel() != len(items) or (scores[items] - given).abs().max() > CLOSE:
            return f"query {row}: items twice or removed, or their scores are not the inner products"
        best = scores.topk(problem.k).values
        if exact and (best - given).abs().max() > CLOSE:
            return f"query {row}: there are better items than those found"
    return None


def times_of(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Returns the milliseconds of each repeat, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return times[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    options = _options(arguments)
    commit = options.commit or bench_records.current_commit()
    sizes = (options.items, options.dim, options.queries, options.k)
    problem = make(*sizes, options.removed, getattr(torch, options.dtype))
    records: list[Record] = []

    def add(search: str, device: torch.device, times: list[float], **more: float | str | None) -> None:
        facts = {"backend": None, "extra_mib": None, "build_s": None, "recall": None} | more
        middle, spread = statistics.median(times), max(times) - min(times)
        facts |= {"search": search, "device": str(device), "dtype": options.dtype, "commit": commit}
        facts |= dict(zip(("items", "dim", "queries", "k"), sizes, strict=True))
        made = Record(**facts, milliseconds=middle, spread=spread, torch=torch.__version__)
        print(_line(made), flush=True)
        records.append(made)

    repeats = options.repeats
    wrong = _exact(problem, options.backend or ["auto"], repeats, add)
    wrong = wrong or _indices(problem, options.index, repeats, add)
    if wrong:
        print(wrong, file=sys.stderr)
        return 1
    bench_records.write(options.record, records)
    return 0


def _exact(problem: Problem, backends: Sequence[str], repeats: int, add: Callable[..., None]) -> str | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    items, queries = problem.items.to(device), problem.queries.to(device)
    for backend in backends:

        def call(backend: str = backend) -> TopK:
            return top_k(queries, items, problem.k, **problem.gone(), backend=backend)

        wrong = fault(problem, call(), exact=True)
        if wrong:
            return f"exact search, backend {last_backend('top_k')}: {wrong}"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        times = times_of(call, device, repeats)
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20 if device.type == "cuda" else None
        add("exact", device, times, extra_mib=extra, backend=last_backend("top_k"))
    return None


def _indices(problem: Problem, chosen: Sequence[str], repeats: int, add: Callable[..., None]) -> str | None:
    cpu = torch.device("cpu")
    for text in chosen:
        factory, _, search = text.partition(" ")
        faiss = pb.FaissIndex(factory=factory, search=search, recall_rows=len(problem.queries))
        began = time.perf_counter()
        index: Search = open_search(pb.Predict(index=pb.ItemIndex(faiss=faiss)), problem.items.float(), cpu)
        build_s = time.perf_counter() - began

        def call(index: Search = index) -> TopK:
            return index.best(problem.queries, problem.k, **problem.gone())

        wrong = fault(problem, call(), exact=False)
        if wrong:
            return f"index {text}: {wrong}"
        recall = index.recall()
        add(text, cpu, times_of(call, cpu, repeats), build_s=build_s, recall=recall and recall.recall)
    return None


def _line(record: Record) -> str:
    facts = {"extra": record.extra_mib, "build": record.build_s, "recall": record.recall}
    units = {"extra": "{:,.0f} MiB", "build": "{:.1f} s", "recall": "{:.4f}"}
    said = [f"{name} {units[name].format(value)}" for name, value in facts.items() if value is not None]
    size = f"{record.items:,} x {record.dim}, {record.queries} queries, top {record.k}"
    time_ = f"{record.milliseconds:,.1f} ms (spread {record.spread:,.1f})"
    search = f"{record.search} ({record.backend}, {record.dtype})" if record.backend else record.search
    return f"{search:<24} {record.device:<5} {size}: {time_}  {'  '.join(said)}"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default in (("items", 1_000_000), ("dim", 64), ("queries", 256), ("k", 10), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--removed", type=int, default=50)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--backend", action="append", choices=("auto", *OP.backends))
    parser.add_argument("--index", action="append", default=[], metavar='"FACTORY [SEARCH]"')
    parser.add_argument("--commit")
    parser.add_argument("--record", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
