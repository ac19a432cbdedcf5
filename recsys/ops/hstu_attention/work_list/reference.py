"""Build work lists in plain PyTorch on the layout's device, without waiting for the host; compilers can trace
it.

`kernels` makes the same lists. `row_intervals` and `column_intervals` supply the mask.

The columns of a list are the int64 numbers of an item, which describes one tile. A tile is a run of
consecutive rows (or keys) of one sample. It visits blocks of keys (or rows), counted from the start of the
sample, in three ascending, disjoint runs: [0, COUNT_A), [START_B, START_B + COUNT_B) and [START_C, START_C +
COUNT_C). With these blocks numbered consecutively, UNMASKED_COUNT of them, from number UNMASKED_AT on, need
no mask; the first of those is block UNMASKED_START.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.layout_facts import HostCopy
from recsys.ops.jagged.mask import AttentionMask, KeyIntervals, column_intervals, row_intervals

START = 0
"""Index of the sample's first row in [T]."""

LENGTH = 1
"""Number of tokens of the sample; 0 for an item that only pads the list."""

HISTORY_END = 2
"""Position of the sample's first target, counted from the sample's start."""

FIRST = 3
"""Position of the tile's first token in the sample; negative if a tile counted from the sample's end begins
before the sample (see `row_work`)."""

COUNT_A = 4

START_B = 5

COUNT_B = 6

START_C = 7

COUNT_C = 8

UNMASKED_AT = 9

UNMASKED_START = 10

UNMASKED_COUNT = 11

NUM_COLUMNS = 12

# With a cache, COUNT_A to UNMASKED_COUNT describe blocks of cached keys, and HISTORY_END counts those keys.

NEW = 8
"""Columns COUNT_A + NEW to UNMASKED_COUNT + NEW describe the blocks of new keys in the same way."""

CACHE_START = 20
"""Index of the sample's first cached row."""

CACHE_LENGTH = 21
"""Number of cached rows of the sample."""

PART = 22
"""Number of the item's part of the cached keys; blocks of cached keys count from the start of the part."""

PART_FIRST = 23
"""Position of the part's first token in the sample."""

PART_LENGTH = 24
"""Number of tokens in the part."""

NUM_CACHED_COLUMNS = 25


class Tiling(NamedTuple):
    """Sizes of a list in tokens, as `work_list.row_work` and `work_list.key_work` explain them."""

    tile: int
    block: int
    section: int | None = None
    tail: int | None = None
    strip: int | None = None


class Interval(NamedTuple):
    """Half-open intervals of tokens, one or several per tile; empty where `end <= start`."""

    start: Tensor  # int64 [n] or [n, intervals]
    end: Tensor


def row_work(mask: AttentionMask, layout: SequenceLayout, tiling: Tiling) -> Tensor:
    """Build the list that `work_list.row_work` describes."""
    tiles = tiles_of(layout, tiling.tile, tiling.tail, tiling.strip)
    seen = _seen(mask, tiles, None, layout.num_contextual)
    runs = _runs(tiles, _hulls(seen), _unmasked(seen), tiling.block)
    return _sorted([*tiles[:4], *runs.columns], _in_sections(runs.work, layout, tiles, tiling))


def key_work(mask: AttentionMask, layout: SequenceLayout, tiling: Tiling) -> Tensor:
    """Build the list that `work_list.key_work` describes."""
    tile, block, _, tail, _ = tiling
    tiles = tiles_of(layout, tile)
    contextual, always = layout.num_contextual, layout.num_contextual + mask.prefix
    outside = tiles.history_end - (mask.window or 0)  # the first key of the last target's window
    edges = [tiles.first, tiles.last, contextual - 1, contextual, always - 1, always]
    edges += [outside - 1, outside, tiles.history_end - 1, tiles.history_end]
    position = _clamped(edges, tiles)
    end, length = tiles.history_end.unsqueeze(1), tiles.length.unsqueeze(1)
    readers = column_intervals(mask, position, end, length, contextual)
    kinds = _union(readers.start, readers.end)
    history = _intersection(readers.start[..., 1], readers.end[..., 1])
    targets = _intersection(readers.start[..., 2], readers.end[..., 2])
    if tail is not None:
        first = (tiles.history_end - tail).clamp(min=0) // block * block
        kinds = Interval(_without_older(kinds, first), kinds.end)
        history = Interval(torch.maximum(history.start, first), history.end)
    # History rows and targets that see all keys form one interval when both reach the border between them.
    joined = (history.start < history.end) & (history.end == targets.start) & (targets.start < targets.end)
    history = Interval(history.start, torch.where(joined, targets.end, history.end))
    unmasked = _longer(history, targets)
    # Rows past the end of a sample are loaded as zeros and add nothing, so its last block may count as a full
    # one.
    rounded = torch.where(unmasked.end == tiles.length, unmasked.end + block - 1, unmasked.end)
    runs = _runs(tiles, kinds, [Interval(unmasked.start, rounded)], block)
    return _sorted([*tiles[:4], *runs.columns], _in_sections(runs.work, layout, tiles, tiling))


def cached_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    cache_layout: SequenceLayout,
    tile: int,
    block: int,
    parts: int = 1,
) -> Tensor:
    """Build the list that `work_list.cached_work` describes."""
    tiles = tiles_of(layout, tile)
    part = torch.zeros_like(tiles.first)
    if parts > 1:
        part = torch.arange(parts, device=layout.device).repeat(tiles.first.shape[0])
        tiles = Tiles(*(column.repeat_interleave(parts) for column in tiles))
    is_real = tiles.length > 0
    start, kept = (
        torch.where(is_real, column.index_select(0, tiles.sample), 0)
        for column in (cache_layout.offsets[:-1], cache_layout.lengths)
    )
    seen = _seen(mask, tiles, kept, cache_layout.num_contextual)
    share = (kept + parts * block - 1) // (parts * block) * block
    first, end = torch.minimum(part * share, kept), torch.minimum((part + 1) * share, kept)
    whole = torch.where(part == parts - 1, kept + tiles.length, kept)
    cached, new = (
        _runs(
            tiles,
            _clipped(_hulls(seen), low.unsqueeze(1), high.unsqueeze(1)),
            [_clipped(interval, low, high) for interval in _unmasked(seen)],
            block,
        )
        for low, high in ((first, end), (kept, whole))
    )
    columns = [tiles.start, tiles.length, tiles.history_end + kept, tiles.first]
    columns += [*cached.columns, *new.columns, start, kept, part, first, end - first]
    return _sorted(columns, cached.work + new.work)


def _in_sections(work: Tensor, layout: SequenceLayout, tiles: Tiles, tiling: Tiling) -> Tensor:
    """Return int64 [n]: the numbers to sort the tiles by, largest first, so that samples come in sections."""
    if tiling.section is None or layout.batch_size == 0:
        return work
    number = sections_of(layout.lengths, tiling.section).index_select(0, tiles.sample)
    largest = layout.total_len // tiling.block + 2 * NUM_COLUMNS  # no tile visits this many blocks
    return torch.where(tiles.length > 0, (layout.total_len - number) * largest + work, 0)


def sections_of(lengths: Tensor, section: int) -> Tensor:
    """Return int64 [B]: the section of each sample; a section has about `section` tokens, longest samples
    first.

    The last two sections are joined: a short last section would leave only a few tiles, all of them long, for
    the end.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths.index_select(0, order)
    number = (ordered.cumsum(0) - ordered) // section
    number = torch.minimum(number, (number.amax() - 1).clamp(min=0))
    return torch.zeros_like(number).scatter(0, order, number)  # graphs can merge what is not in place


def _seen(mask: AttentionMask, tiles: Tiles, before: Tensor | None, contextual: int) -> KeyIntervals:
    """Return the keys that selected rows of each tile see, [n, edges, 3]; they bound what all of its rows
    see.

    Tiles count tokens from behind the first `before` tokens, int64 [n], of the sample.
    """
    # The ends of an interval are constant or increasing over the rows of one kind, so the first and the last
    # row of each kind have the extremes. Prefix rows are a kind of their own: no window hides their keys.
    history_end, always = tiles.history_end, contextual + mask.prefix
    edges: list[Tensor | int] = [contextual - 1, contextual, always - 1, always]
    if before is not None:
        edges = [edge - before for edge in edges]
    position = _clamped([tiles.first, tiles.last, *edges, history_end - 1, history_end], tiles)
    if before is not None:
        position, history_end = position + before.unsqueeze(1), history_end + before
    return row_intervals(mask, position, history_end.unsqueeze(1), contextual)


def _hulls(seen: KeyIntervals) -> Interval:
    """Return the hull of what the rows of a tile see, [n, 3]: contextual tokens and prefix, window, target
    group."""
    return _union(seen.start, seen.end)


def _unmasked(seen: KeyIntervals) -> list[Interval]:
    """Return the keys that all rows of a tile see in their first interval, and in their second."""
    first = Interval(torch.zeros_like(seen.end[:, 0, 0]), seen.end[..., 0].amin(1))
    return [first, _intersection(seen.start[..., 1], seen.end[..., 1])]


def _clipped(interval: Interval, low: Tensor, high: Tensor) -> Interval:
    """Return the part of an interval that lies in [low, high), counted from `low`; [0, 0) if it is empty."""
    start, end = (torch.minimum(torch.maximum(edge, low), high) - low for edge in interval)
    return Interval(torch.where(end > start, start, 0), torch.where(end > start, end, 0))


def _without_older(kinds: Interval, first: Tensor) -> Tensor:
    """Return the starts of the three intervals of rows that see each tile of keys, with history from token
    `first` on.

    The last history row stays if no other rows see the tile: a program that visits no block would write
    nothing.
    """
    contextual, history, targets = kinds.start.unbind(1)
    newer = torch.maximum(history, first)
    alone = (kinds.end[:, 0] <= contextual) & (kinds.end[:, 2] <= targets)
    newer = torch.where(alone, torch.minimum(newer, kinds.end[:, 1] - 1).clamp(min=0), newer)
    return torch.stack([contextual, newer, targets], dim=1)


def _clamped(edges: list[Tensor | int], tiles: Tiles) -> Tensor:
    """Return int64 [n, edges]: the edges, clamped to the tokens of each tile."""
    columns = [edge if isinstance(edge, Tensor) else torch.full_like(tiles.first, edge) for edge in edges]
    position = torch.stack(columns, dim=1)
    first = tiles.first.clamp(min=0).unsqueeze(1)
    return torch.maximum(torch.minimum(position, tiles.last.unsqueeze(1)), first)


def _union(start: Tensor, end: Tensor) -> Interval:
    """Return the hull of the nonempty intervals of [n, edges, ...], or [0, 0) if all are empty."""
    used = end > start
    low = torch.where(used, start, torch.iinfo(torch.int64).max).amin(1)
    high = torch.where(used, end, 0).amax(1)
    return Interval(torch.where(high > 0, low, 0), high)


def _intersection(start: Tensor, end: Tensor) -> Interval:
    return Interval(start.amax(1), end.amin(1))


def _longer(a: Interval, b: Interval) -> Interval:
    is_a = a.end - a.start >= b.end - b.start
    return Interval(torch.where(is_a, a.start, b.start), torch.where(is_a, a.end, b.end))


class Runs(NamedTuple):
    """Blocks of keys (or rows) that each tile visits."""

    columns: list[Tensor]  # COUNT_A to UNMASKED_COUNT, int64 [n] each
    work: Tensor  # int64 [n], number of blocks


def _runs(tiles: Tiles, parts: Interval, unmasked: Sequence[Interval], block: int) -> Runs:
    """Turn intervals, [n, 3], into disjoint runs of blocks; the longest interval of `unmasked` needs no
    mask."""
    is_real = tiles.length > 0
    first, end = parts.start // block, (parts.end + block - 1) // block * is_real.unsqueeze(1)
    # A run begins where the runs before it end.
    ended = torch.where(end > first, end, 0)
    end_a, end_b, _ = ended.unbind(1)
    taken = torch.stack([torch.zeros_like(end_a), end_a, torch.maximum(end_a, end_b)], dim=1)
    first = torch.maximum(first, taken)
    count = (end - first).clamp(min=0)
    free = reduce(_longer, unmasked)
    full_start = (free.start + block - 1) // block
    full_count = (free.end // block - full_start).clamp(min=0) * is_real
    before = torch.minimum((full_start.unsqueeze(1) - first).clamp(min=0), count).sum(1)
    (a, b, c), starts = count.unbind(1), first[:, 1:].unbind(1)
    columns = [a, starts[0], b, starts[1], c, before, full_start, full_count]
    return Runs(columns, count.sum(1))


def _sorted(columns: list[Tensor], work: Tensor) -> Tensor:
    """Return the items, int64 [n, columns], with the most work first."""
    order = torch.argsort(work, descending=True, stable=True)
    return torch.stack(columns, dim=1).index_select(0, order)


class Tiles(NamedTuple):
    """Tiles of consecutive tokens, each of one sample; tiles of length 0 pad the list."""

    start: Tensor  # int64 [n], index in [T] of the sample's first row
    length: Tensor  # int64 [n], tokens of the sample; 0 for padding
    history_end: Tensor  # int64 [n], position of the sample's first target
    first: Tensor  # int64 [n], first token; negative where a tile begins before its sample
    last: Tensor  # int64 [n], last token, always inside the sample
    sample: Tensor  # int64 [n], number of the sample; arbitrary for padding


def tiles_of(layout: SequenceLayout, tile: int, tail: int | None = None, strip: int | None = None) -> Tiles:
    """Return `num_tiles_of` tiles, padding last. `row_work` explains `tail` and `strip`."""
    return layout.memo(("tiles", tile, tail, strip), lambda: _new_tiles(layout, tile, tail, strip))


def num_tiles_of(layout: SequenceLayout, tile: int, tail: int | None = None, strip: int | None = None) -> int:
    """Count the tiles of all samples; return an upper bound if only the device knows the lengths."""
    host = layout.host_copy
    if host is None or torch.compiler.is_compiling():
        return layout.total_len // tile + layout.batch_size
    contextual = layout.num_contextual
    return layout.memo(
        ("num_tiles", tile, tail, strip), lambda: _counted(host, contextual, tile, tail, strip)
    )


def _counted(host: HostCopy, contextual: int, tile: int, tail: int | None, strip: int | None) -> int:
    counts = (host.lengths + tile - 1) // tile
    if tail is not None:
        history_end, missing = host.lengths - host.num_targets, rows_missing(host.lengths, tile, strip)
        counts = counts - tiles_left_out(history_end, contextual, tile, tail, missing).count
    return int(counts.sum())


class LeftOut(NamedTuple):
    """Tiles that are left out in the middle of each sample, int64 [B]; 0 if there are none."""

    first: Tensor | int
    count: Tensor | int


def rows_missing(lengths: Tensor, tile: int, strip: int | None) -> Tensor:
    """Return how many rows before each sample its first tile begins, a multiple of `strip`."""
    return torch.zeros_like(lengths) if strip is None else -(-lengths // strip) * -strip % tile


def tiles_left_out(
    history_end: Tensor, contextual: int, tile: int, tail: int | None, missing: Tensor | int = 0
) -> LeftOut:
    """Find the tiles that hold only history older than the newest `tail` tokens; `missing` is from
    `rows_missing`."""
    if tail is None:
        return LeftOut(0, 0)
    end = ((history_end - tail).clamp(min=contextual) + missing) // tile
    behind = (contextual + missing + tile - 1) // tile if contextual else 0
    first = torch.minimum(end, torch.zeros_like(end) + behind)
    return LeftOut(first, end - first)


def _new_tiles(layout: SequenceLayout, tile: int, tail: int | None, strip: int | None) -> Tiles:
    num_tiles, missing = num_tiles_of(layout, tile, tail, strip), rows_missing(layout.lengths, tile, strip)
    left_out = tiles_left_out(layout.history_end, layout.num_contextual, tile, tail, missing)
    counts = (layout.lengths + tile - 1) // tile - left_out.count
    ends = counts.cumsum(0)
    number = torch.arange(num_tiles, device=layout.device)
    sample = torch.searchsorted(ends, number, right=True)
    is_real = sample < layout.batch_size
    sample = sample.clamp(max=max(layout.batch_size - 1, 0))
    of_sample = torch.stack([layout.offsets[:-1], layout.lengths, layout.history_end, ends - counts], dim=1)
    start, length, history_end, before = (of_sample.index_select(0, sample) * is_real.unsqueeze(1)).unbind(1)
    place = number - before
    if tail is not None:
        behind, skipped = (column.index_select(0, sample) for column in left_out)
        place = place + torch.where(place >= behind, skipped, 0)
    first = torch.where(is_real, place * tile - missing.index_select(0, sample), 0)
    return Tiles(start, length, history_end, first, torch.minimum(first + tile, length) - 1, sample)
