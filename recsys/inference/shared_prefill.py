"""Rows that share one prefill: the candidates of neighbouring rows with the same user, request and history.

Such rows become one row with all their candidates; its history runs through the model once, then candidates
are scored against what was kept of it, some at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.block import Block, Flat, offsets_of
from recsys.inference.package import Package
from recsys.inference.rows import cut_into_pieces, in_pieces, runs


def score_with_cache(
    package: Package,
    block: Block,
    to_batch: Callable[[Block], Batch],
    *,
    users: int,
    most: int,
    group_size: int,
) -> np.ndarray:
    """float32 [N, tasks], the scores of all candidates of a block, in its order.

    Args:
        package: that has the programs for it.
        to_batch: makes a batch of rows.
        users: whose caches are held at a time.
        most: candidates that are scored together, padding included; whole target groups.
        group_size: candidates of a target group.
    """
    found: list[torch.Tensor] = []
    merged = merge(block, group_size)
    merged = merged.select(np.flatnonzero(merged.lengths[pb.CANDIDATE]))
    for rows in runs(len(merged.row), users):
        part = merged.select(rows)
        cache = package.prefill(to_batch(without(part, pb.CANDIDATE)))
        pieces, lengths = in_pieces(without(part, pb.HISTORY), most), part.lengths[pb.CANDIDATE]
        owner = cut_into_pieces(lengths, most).row.tolist()
        for run in packed(pieces.lengths[pb.CANDIDATE].tolist(), most):
            mine = owner[run]
            own = cache if mine == list(range(len(lengths))) else cache.select(mine)
            # Left on the device: the next piece is put together while this one is scored.
            found.append(package.score(to_batch(pieces.select(run)), own))
    if not found:
        return np.zeros((0, len(package.description.outputs)), np.float32)
    return torch.cat(found).cpu().numpy()


def merge(block: Block, group_size: int) -> Block:
    """The rows of a block, runs of rows with the same user, request and history as one; candidates stay in
    their order.

    A row with a broken target group at its end has no other row behind it: groups would move.
    """
    lengths = block.lengths[pb.CANDIDATE]
    together = same_as_before(block)
    together[1:] &= lengths[:-1] % group_size == 0
    first = np.flatnonzero(~together)
    if len(first) == len(lengths):
        return block
    candidates = {name: column for name, column in block.flat.items() if column.side == pb.CANDIDATE}
    merged = without(block, pb.CANDIDATE).select(first)
    merged.lengths[pb.CANDIDATE] = np.add.reduceat(lengths, first)
    return replace(merged, flat={**merged.flat, **candidates})


def same_as_before(block: Block) -> np.ndarray:
    """bool [rows]: whether a row has the user, request and history of the row before it."""
    rows = len(block.row)
    same = np.arange(rows) > 0
    for column in block.flat.values():
        if column.side == pb.CANDIDATE:
            continue
        counts = np.ones(rows, np.int64) if column.side == pb.USER else block.lengths[column.side]
        if column.offsets is not None:
            same &= _equal(np.diff(column.offsets), counts)
            counts = np.diff(column.offsets[offsets_of(counts)])
        same &= _equal(column.values, counts)
    return same


def without(block: Block, side: int) -> Block:
    """The same rows with no events, or no candidates."""
    flat = {
        name: column if column.side != side else Flat(side, column.values[:0], _nothing(column))
        for name, column in block.flat.items()
    }
    return replace(block, flat=flat, lengths={**block.lengths, side: np.zeros_like(block.lengths[side])})


def packed(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Runs of pieces, as long as they fit into `most` candidates when padded to the longest of the run."""
    start, longest = 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if place > start and (place - start + 1) * longest > most:
            yield slice(start, place)
            start, longest = place, length
    if start < len(lengths):
        yield slice(start, len(lengths))


def _equal(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """bool [rows]: whether a row has the values of the row before it. `counts` are those of each row."""
    row = np.repeat(np.arange(len(counts)), counts)
    # Where the row before has as many, its value at the same place is one row's length away.
    before = np.maximum(np.arange(len(values)) - counts[row], 0)
    unlike = np.bincount(row, weights=values != values[before], minlength=len(counts)) > 0
    unlike[1:] |= counts[1:] != counts[:-1]
    return ~unlike


def _nothing(column: Flat) -> np.ndarray | None:
    return None if column.offsets is None else column.offsets[:1]
