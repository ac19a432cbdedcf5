"""Moves rows between ranks before a step, so that the batch of each rank costs about the same.

A step waits for the rank whose batch costs most. Readers decide which rows a step has. The ranks then tell
each other what these rows cost, all of them divide the rows in the same way, and rows are sent to the ranks
that compute them. The result depends on the rows of the step alone, so a resumed run divides them alike.
All of this happens on the host, in a thread, while the step before is computed.
"""

import heapq
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from recsys.data.convert.batch_rows import BatchRows
from recsys.data.convert.packer import BatchArrays
from recsys.training.background import in_background

EVEN_ENOUGH = 1.01
"""Rows stay where they are if the rank with the most work has at most this many times the mean."""


class RowExchange:
    """Exchanges the rows of a step. Every rank calls `begin` with the arrays that it has read, then `end`.

    Attributes:
        waiting: makes the block in which `end` waits for other ranks.

    Args:
        rows: selects and joins rows.
        count_flops: counts the FLOP of a forward pass over a batch from lengths alone.
        filler: makes a batch of n filler rows, which have neither events nor candidates.
        max_rows: most rows that a rank reads for a step.
        group: a gloo group of all ranks, which nothing else uses at the same time.
    """

    def __init__(
        self,
        rows: BatchRows,
        count_flops: Callable[[BatchArrays], int],
        filler: Callable[[int], BatchArrays],
        max_rows: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._rows = rows
        self._count_flops = count_flops
        self._filler = filler
        self._max_rows = max_rows
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._costs: dict[tuple[int, ...], int] = {}
        self._shared: int | None = None
        self._exchanging: Future[BatchArrays] | None = None
        self.waiting: Callable[[], AbstractContextManager] = nullcontext

    def begin(self, arrays: BatchArrays) -> None:
        """Starts to exchange rows in a thread. Collective, and so is the `end` that must follow.

        Until then, the arrays must not change.
        """
        costs = self.costs(arrays)
        self._exchanging = in_background(lambda: self._exchange(arrays, costs), "row exchange")

    def end(self) -> BatchArrays:
        """Returns the rows that this rank computes, at least one.

        Rows are ordered by the rank that has read them, and then as they were read. `counts` remains that of
        the rows that this rank has read.
        """
        exchanging, self._exchanging = self._exchanging, None
        if exchanging is None:
            raise RuntimeError("end() without begin()")
        with self.waiting():
            return exchanging.result()

    def _exchange(self, arrays: BatchArrays, own_costs: np.ndarray) -> BatchArrays:
        costs = self._gather_costs(own_costs)
        owners = divide(costs)
        if all((owner == rank).all() for rank, owner in enumerate(owners)):
            return arrays
        parts = [
            self._rows.select(arrays, np.flatnonzero(owners[self._rank] == rank))
            for rank in range(self._world_size)
        ]
        received = self._swap(parts)
        received[self._rank] = parts[self._rank]
        joined = self._rows.join([part for part in received if part is not None and len(part.row)])
        joined.counts = arrays.counts
        return joined

    def costs(self, arrays: BatchArrays) -> np.ndarray:
        """Returns the FLOP of a forward pass of each row, int64 [rows], without work that rows share.

        They are those of lengths rounded to 7 binary digits, so that few of them have to be counted.
        """
        lengths = [arrays.uih_lengths, arrays.num_candidates, *arrays.channel_lengths.values()]
        rounded = np.stack([_rounded(numbers) for numbers in lengths], axis=1).tolist()
        return np.array([self._cost(tuple(row)) for row in rounded], np.int64)

    def _cost(self, lengths: tuple[int, ...]) -> int:
        if self._shared is None:
            # Two rows have what rows share only once.
            self._shared = 2 * self._count_flops(self._filler(1)) - self._count_flops(self._filler(2))
        if lengths not in self._costs:
            self._costs[lengths] = max(1, self._count_flops(self._row(*lengths)) - self._shared)
        return self._costs[lengths]

    def _row(self, events: int, candidates: int, *in_channels: int) -> BatchArrays:
        """Makes a row of these lengths, which are all that a model needs to count its FLOP."""
        row = self._filler(1)
        channels = dict(zip(row.channel_lengths, in_channels, strict=True))
        return replace(
            row,
            uih_lengths=np.array([events]),
            num_candidates=np.array([candidates]),
            uih_timestamps=np.zeros(events, np.int64),
            candidate_timestamps=np.zeros(candidates, np.int64),
            channel_lengths={name: np.array([length]) for name, length in channels.items()},
            channel_events={name: np.arange(length) for name, length in channels.items()},
        )

    def _gather_costs(self, costs: np.ndarray) -> list[np.ndarray]:
        """Returns the costs of the rows of all ranks."""
        padded = torch.full([self._max_rows], -1, dtype=torch.int64)
        padded[: len(costs)] = torch.from_numpy(costs)
        gathered = [torch.empty_like(padded) for _ in range(self._world_size)]
        dist.all_gather(gathered, padded, self._group)
        return [rank[rank > 0].numpy() for rank in gathered]

    def _swap(self, parts: list[BatchArrays]) -> list[BatchArrays | None]:
        """Sends each part to the rank of its index and returns what the ranks sent; None for nothing."""
        sent = [
            pickle.dumps(part, pickle.HIGHEST_PROTOCOL) if rank != self._rank and len(part.row) else b""
            for rank, part in enumerate(parts)
        ]
        sizes = torch.tensor([len(message) for message in sent])
        incoming = torch.empty_like(sizes)
        dist.all_to_all_single(incoming, sizes, group=self._group)
        splits = incoming.tolist()
        output = torch.empty(sum(splits), dtype=torch.uint8)
        joined = torch.frombuffer(bytearray(b"".join(sent)) or bytearray(1), dtype=torch.uint8)
        dist.all_to_all_single(output, joined[: int(sizes.sum())], splits, sizes.tolist(), group=self._group)
        # Both ends are processes of this run.
        return [
            pickle.loads(message.numpy()) if len(message) else None  # noqa: S301
            for message in output.split(splits)
        ]


def _rounded(lengths: np.ndarray) -> np.ndarray:
    unit = 1 << np.maximum(np.frexp(lengths)[1] - 7, 0)
    return (lengths + unit // 2) // unit * unit


def divide(costs: list[np.ndarray]) -> list[np.ndarray]:
    """Divides the rows of a step among the ranks, the most expensive row first, each to the rank with the
    least work so far (Graham's longest processing time first: at most 4/3 of the best division).

    Args:
        costs: by rank, int64 [rows], positive costs of the rows that it has read. There are at least as many
            rows as ranks.

    Returns:
        By rank, int64 [rows], the rank that computes each of its rows; every rank computes one or more.
    """
    loads = [int(rank.sum()) for rank in costs]
    sizes = [len(rank) for rank in costs]
    if min(sizes) and max(loads) * len(loads) <= EVEN_ENOUGH * sum(loads):
        return [np.full(size, rank) for rank, size in enumerate(sizes)]
    every = np.concatenate(costs)
    owners = np.empty(len(every), np.int64)
    ranks = [(0, rank) for rank in range(len(costs))]
    for row in np.argsort(-every, kind="stable").tolist():
        load, rank = ranks[0]
        owners[row] = rank
        heapq.heapreplace(ranks, (load + int(every[row]), rank))
    return np.split(owners, np.cumsum(sizes)[:-1])
