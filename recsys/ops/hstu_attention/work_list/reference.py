"""The real tiles of a batch: which blocks each of them works on, longest first.

A kernel gives one program to a tile: some consecutive rows (or keys) of one sample. Tiles past the end of a
sample are not in the list, so padding costs nothing, and the longest tiles start first, so that no long one
is left alone at the end. For each tile the list says which blocks of keys (or rows) it has to visit: those
outside of the window are not among them, and those that need no mask are marked.

Plain PyTorch on the layout's device: nothing waits for the host, and a compiler can trace it. On a GPU, in
eager mode, `work_list_start` makes the same lists by a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.work_list.tiles import Tiles, tiles_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask, KeyIntervals, column_intervals, row_intervals
from recsys.ops.runtime import triton_support

START, LENGTH, HISTORY_END, FIRST = 0, 1, 2, 3
"""Columns of an item: the sample's first row in [T], length and first target; the tile's first token, which
may lie before the sample (see `row_work`)."""

COUNT_A, START_B, COUNT_B, START_C, COUNT_C = 4, 5, 6, 7, 8
"""Columns: the blocks to visit are [0, A), [b, b + B) and [c, c + C), ascending and disjoint."""

UNMASKED_AT, UNMASKED_START, UNMASKED_COUNT = 9, 10, 11
"""Columns: of these blocks, numbered one after the other, those from number `UNMASKED_AT` on need no mask:
`UNMASKED_COUNT` blocks, the first of which is block `UNMASKED_START`."""

NUM_COLUMNS = 12

NEW = 8
"""With a cache, these columns are about blocks of cached keys; those `NEW` further on, of new keys."""

CACHE_START, CACHE_LENGTH = 20, 21
"""Columns: the sample's first cached row and how many there are; `HISTORY_END` counts them too."""

PART, PART_FIRST, PART_LENGTH = 22, 23, 24
"""Columns: which part of the cached keys the item is about, the part's first token in the sample and how many
it has. Blocks of cached keys are counted from there."""

NUM_CACHED_COLUMNS = 25

_START = f"{__name__.rpartition('.')[0]}.launch"


class Interval(NamedTuple):
    """Half-open intervals of tokens, one a tile or several; empty where `end <= start`."""

    start: Tensor  # int64 [n] or [n, intervals]
    end: Tensor


def row_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None = None,
    tail: int | None = None,
    strip: int | None = None,
) -> Tensor:
    """int64 [n, NUM_COLUMNS]: tiles of `tile` rows, each with the blocks of `block` keys that it sees.

    Args:
        section: so many tokens of keys and values fit into a cache. The samples, longest first, are then
            worked through in sections of about so many, and only within a section the longest tile comes
            first.
        tail: tiles of nothing but history older than the newest `tail` tokens of it are left out.
        strip: tiles are cut into strips of so many rows, and a sample's last tile shall have no empty ones:
            where the rows that see most keys are. Its first tile begins so many strips before the sample.
    """
    return layout.memo(
        ("row_work", mask, tile, block, section, tail, strip),
        lambda: _row_work(mask, layout, tile, block, section, tail, strip),
    )


def key_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None = None,
    tail: int | None = None,
) -> Tensor:
    """int64 [n, NUM_COLUMNS]: tiles of `tile` keys, each with the blocks of `block` rows that see it, in
    sections as those of `row_work`. `tail`: blocks of nothing but older history are left out, as far as a
    tile has others."""
    return layout.memo(
        ("key_work", mask, tile, block, section, tail),
        lambda: _key_work(mask, layout, tile, block, section, tail),
    )


def cached_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    cache_layout: SequenceLayout,
    tile: int,
    block: int,
    parts: int = 1,
) -> Tensor:
    """int64 [n, NUM_CACHED_COLUMNS]: tiles of `tile` new rows, each with the blocks of `block` cached keys
    and those of `block` new keys that it sees.

    Each tile is there once for each of `parts` equal parts of its sample's cached keys, the last of which has
    the new keys too.
    """
    return layout.memo(
        ("cached_work", mask, cache_layout, tile, block, parts),
        lambda: _cached_work(mask, layout, cache_layout, tile, block, parts),
    )


def _row_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None,
    tail: int | None = None,
    strip: int | None = None,
) -> Tensor:
    if _has_kernel(layout):
        kernel = triton_support.load(_START)
        return kernel.items_of(mask, layout, tile, block, section, tail, strip, keys=False)
    tiles = tiles_of(layout, tile, tail, strip)
    seen = _seen(mask, tiles, None, layout.num_contextual)
    runs = _runs(tiles, _hulls(seen), _unmasked(seen), block)
    return _sorted([*tiles[:4], *runs.columns], _in_sections(runs.work, layout, tiles, block, section))


def _has_kernel(layout: SequenceLayout) -> bool:
    """Whether `work_list_start` makes the list. Not where an op is looked into, for a graph: its tensors are
    of other types there, and hold no numbers."""
    is_real = type(layout.lengths) is Tensor and not torch.compiler.is_compiling()
    return layout.device.type == "cuda" and is_real


def _in_sections(
    work: Tensor, layout: SequenceLayout, tiles: Tiles, block: int, section: int | None
) -> Tensor:
    """int64 [n]: what to sort by, the largest first, for sections of the samples."""
    if section is None or layout.batch_size == 0:
        return work
    number = sections_of(layout.lengths, section).index_select(0, tiles.sample)
    most = layout.total_len // block + 2 * NUM_COLUMNS  # no tile visits more blocks
    return torch.where(tiles.length > 0, (layout.total_len - number) * most + work, 0)


def sections_of(lengths: Tensor, section: int) -> Tensor:
    """int64 [B]: which section each sample is in; `section` tokens each, the longest samples first.

    The last two are one: of a short last section too few tiles would be left for the end, all long ones.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    ordered = lengths.index_select(0, order)
    number = (ordered.cumsum(0) - ordered) // section
    number = torch.minimum(number, (number.amax() - 1).clamp(min=0))
    return torch.empty_like(number).scatter_(0, order, number)


def _cached_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    cache_layout: SequenceLayout,
    tile: int,
    block: int,
    parts: int,
) -> Tensor:
    if _has_kernel(layout):
        return triton_support.load(_START).cached_items_of(mask, layout, cache_layout, tile, block, parts)
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
            _part(_hulls(seen), low.unsqueeze(1), high.unsqueeze(1)),
            [_part(interval, low, high) for interval in _unmasked(seen)],
            block,
        )
        for low, high in ((first, end), (kept, whole))
    )
    columns = [tiles.start, tiles.length, tiles.history_end + kept, tiles.first]
    columns += [*cached.columns, *new.columns, start, kept, part, first, end - first]
    return _sorted(columns, cached.work + new.work)


def _seen(mask: AttentionMask, tiles: Tiles, before: Tensor | None, contextual: int) -> KeyIntervals:
    """What the rows of each tile see that bound what all its rows see, [n, edges, 3]; `before`, int64 [n]:
    tokens of the sample in front of those that the tiles count."""
    # The ends of the intervals are constant or increasing over the rows of one kind: the first and the last
    # row of each kind have the extremes. Rows of the prefix are a kind: they have no window of their own.
    history_end, always = tiles.history_end, contextual + mask.prefix
    edges: list[Tensor | int] = [contextual - 1, contextual, always - 1, always]
    if before is not None:
        edges = [edge - before for edge in edges]
    position = _clamped([tiles.first, tiles.last, *edges, history_end - 1, history_end], tiles)
    if before is not None:
        position, history_end = position + before.unsqueeze(1), history_end + before
    return row_intervals(mask, position, history_end.unsqueeze(1), contextual)


def _hulls(seen: KeyIntervals) -> Interval:
    """[n, 3]: contextual tokens and prefix, the window, the own group; what some row of a tile sees."""
    return _union(seen.start, seen.end)


def _unmasked(seen: KeyIntervals) -> list[Interval]:
    """The keys that all rows of a tile see, by their first and by their second interval."""
    first = Interval(torch.zeros_like(seen.end[:, 0, 0]), seen.end[..., 0].amin(1))
    return [first, _intersection(seen.start[..., 1], seen.end[..., 1])]


def _part(interval: Interval, low: Tensor, high: Tensor) -> Interval:
    """What of an interval lies in [low, high), counted from `low`; [0, 0) for nothing."""
    start, end = (torch.minimum(torch.maximum(edge, low), high) - low for edge in interval)
    return Interval(torch.where(end > start, start, 0), torch.where(end > start, end, 0))


def _key_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None,
    tail: int | None = None,
) -> Tensor:
    if _has_kernel(layout):
        return triton_support.load(_START).items_of(mask, layout, tile, block, section, tail, keys=True)
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
    # History rows that see all keys, and targets that do, follow one another when both reach the border.
    joined = (history.start < history.end) & (history.end == targets.start) & (targets.start < targets.end)
    history = Interval(history.start, torch.where(joined, targets.end, history.end))
    unmasked = _longer(history, targets)
    # Rows past the end of a sample are loaded as zeros and add nothing: its last block may be a full one.
    rounded = torch.where(unmasked.end == tiles.length, unmasked.end + block - 1, unmasked.end)
    runs = _runs(tiles, kinds, [Interval(unmasked.start, rounded)], block)
    return _sorted([*tiles[:4], *runs.columns], _in_sections(runs.work, layout, tiles, block, section))


def _without_older(kinds: Interval, first: Tensor) -> Tensor:
    """The starts of what sees each tile of keys, of history from token `first` on; the last block of it stays
    where nothing else sees the tile: a program that visits no block would write nothing."""
    contextual, history, targets = kinds.start.unbind(1)
    newer = torch.maximum(history, first)
    alone = (kinds.end[:, 0] <= contextual) & (kinds.end[:, 2] <= targets)
    newer = torch.where(alone, torch.minimum(newer, kinds.end[:, 1] - 1).clamp(min=0), newer)
    return torch.stack([contextual, newer, targets], dim=1)


def _clamped(edges: list[Tensor | int], tiles: Tiles) -> Tensor:
    """int64 [n, edges]: tokens of each tile; an edge outside of it becomes its first or last one."""
    columns = [edge if isinstance(edge, Tensor) else torch.full_like(tiles.first, edge) for edge in edges]
    position = torch.stack(columns, dim=1)
    first = tiles.first.clamp(min=0).unsqueeze(1)
    return torch.maximum(torch.minimum(position, tiles.last.unsqueeze(1)), first)


def _union(start: Tensor, end: Tensor) -> Interval:
    """The hull of the intervals [n, edges, ...] that are not empty; [0, 0) if all are."""
    used = end > start
    low = torch.where(used, start, torch.iinfo(torch.int64).max).amin(1)
    high = torch.where(used, end, 0).amax(1)
    return Interval(torch.where(high > 0, low, 0), high)


def _intersection(start: Tensor, end: Tensor) -> Interval:
    return Interval(start.amax(1), end.amin(1))


def _longer(one: Interval, other: Interval) -> Interval:
    first = one.end - one.start >= other.end - other.start
    return Interval(torch.where(first, one.start, other.start), torch.where(first, one.end, other.end))


class Runs(NamedTuple):
    """The blocks of one list of keys (or rows) that each tile visits."""

    columns: list[Tensor]  # COUNT_A to UNMASKED_COUNT, int64 [n] each
    work: Tensor  # int64 [n], how many blocks


def _runs(tiles: Tiles, parts: Interval, unmasked: Sequence[Interval], block: int) -> Runs:
    """Intervals of tokens, [n, 3], as disjoint runs of blocks; the longest of `unmasked` needs no mask."""
    is_real = tiles.length > 0
    first, end = parts.start // block, (parts.end + block - 1) // block * is_real.unsqueeze(1)
    # A run begins where those before it have ended.
    ended = torch.where(end > first, end, 0)
    one, two, _ = ended.unbind(1)
    first = torch.maximum(first, torch.stack([torch.zeros_like(one), one, torch.maximum(one, two)], dim=1))
    count = (end - first).clamp(min=0)
    free = reduce(_longer, unmasked)
    full_start = (free.start + block - 1) // block
    full_count = (free.end // block - full_start).clamp(min=0) * is_real
    before = torch.minimum((full_start.unsqueeze(1) - first).clamp(min=0), count).sum(1)
    (a, b, c), starts = count.unbind(1), first[:, 1:].unbind(1)
    columns = [a, starts[0], b, starts[1], c, before, full_start, full_count]
    return Runs(columns, count.sum(1))


def _sorted(columns: list[Tensor], work: Tensor) -> Tensor:
    """int64 [n, columns]: the tile with the most blocks first."""
    order = torch.argsort(work, descending=True, stable=True)
    return torch.stack(columns, dim=1).index_select(0, order)
