#!/usr/bin/env python3
"""Measures the all-reduce and the all-to-all of the ranks that torchrun starts, by size of the message.

    torchrun --standalone --nproc-per-node 4 scripts/bench_collectives.py --record collectives.json
    torchrun --standalone --nproc-per-node 2 scripts/bench_collectives.py --sizes 4096 1048576

Training sums gradients of dense weights by the first and moves embeddings and their gradients by the second.
GPUs use NCCL, CPUs gloo. `size` is the bytes of a rank's tensor, `us` the microseconds of a call on the
slowest rank, and `gb_per_s` the bytes that a rank sends divided by that time, in 10^9 bytes per second, which
is the bus bandwidth of nccl-tests: 2 (n - 1) / n of the size for an all-reduce, (n - 1) / n for an all-to-all
among n ranks. A result is checked before its time is taken. scripts/cost_model.py takes the bandwidth of the
largest size and the time of the smallest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recsys.errors import ConfigError, RecsysError
from recsys.flags import Parser, positive
from recsys.training.distributed import Processes, gather, process_group
from scripts import bench_records

SIZES = tuple(4096 * 4**power for power in range(9))
"""4 KiB to 256 MiB."""

MOST_SECONDS = 1.0
"""A size is repeated for about this long at most."""


@dataclass(frozen=True)
class Record:
    """The time of a collective for one size; see the head of this file."""

    collective: str
    ranks: int
    size: int
    us: float
    gb_per_s: float
    calls: int
    device: str
    backend: str
    commit: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures both collectives for all sizes."""
    options = _options(arguments)
    try:
        with process_group() as processes:
            if processes.world_size == 1:
                raise ConfigError("one process has nobody to send to; start at least two with torchrun")
            for collective in ("all_reduce", "all_to_all"):
                for size in sorted(options.sizes):
                    record = measure(collective, size, options, processes)
                    if processes.is_main:
                        print(line_of(record), flush=True)
                        bench_records.write(options.record, [record], grow=True)
    except RecsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def measure(collective: str, size: int, options: argparse.Namespace, processes: Processes) -> Record:
    """Checks and times a collective of `size` bytes a rank, rounded up to whole rows. Collective."""
    ranks, device = processes.world_size, processes.device
    numbers = -(-size // (4 * ranks)) * ranks
    call = _checked(collective, numbers, processes)
    seconds = _seconds(call, 3, device)
    calls = max(3, min(options.calls, int(MOST_SECONDS / seconds)))
    seconds = _seconds(call, calls, device)
    sent = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks * 4 * numbers
    return Record(
        collective=collective,
        ranks=ranks,
        size=4 * numbers,
        us=1e6 * seconds,
        gb_per_s=sent / seconds / 1e9,
        calls=calls,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        backend="nccl" if device.type == "cuda" else "gloo",
        commit=options.commit or bench_records.current_commit(),
    )


def _checked(collective: str, numbers: int, processes: Processes) -> Callable[[], object]:
    """Returns a function that runs the collective once, after a first result that was right.

    Raises:
        RecsysError: the result is wrong.
    """
    ranks, rank, device = processes.world_size, processes.rank, processes.device
    if collective == "all_reduce":
        ones = torch.ones(numbers, device=device)
        dist.all_reduce(ones)
        _require(bool((ones == ranks).all()), collective)
        zeros = torch.zeros(numbers, device=device)
        return lambda: dist.all_reduce(zeros)
    # Block j of rank i holds 1000 i + j; afterwards, rank j has it as its block i.
    blocks = torch.arange(ranks, device=device, dtype=torch.float32)
    sent = (1000 * rank + blocks).repeat_interleave(numbers // ranks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    expected = (1000 * blocks + rank).repeat_interleave(numbers // ranks)
    _require(torch.equal(received, expected), collective)
    return lambda: dist.all_to_all_single(received, sent)


def _require(right: bool, collective: str) -> None:
    if not all(gather(right)):
        raise RecsysError(f"{collective}: the result is wrong, so its time means nothing")


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Returns the mean seconds of a call on the slowest rank; the same on all ranks."""
    dist.barrier()
    _finish(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _finish(device)
    return max(gather((time.perf_counter() - began) / calls))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def line_of(record: Record) -> str:
    """Formats a record as one line."""
    return (
        f"{record.collective:10}  {record.ranks} ranks  {record.size / 2**10:>9,.0f} KiB  "
        f"{record.us:>11,.1f} us  {record.gb_per_s:>8.2f} GB/s"
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--sizes", type=positive, nargs="+", default=SIZES, metavar="BYTES")
    parser.add_argument("--calls", type=positive, default=100, help="most calls a size; default: 100")
    parser.add_argument("--record", type=Path, help="file to which the results are added")
    parser.add_argument("--commit", help="commit to record, for machines without git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
