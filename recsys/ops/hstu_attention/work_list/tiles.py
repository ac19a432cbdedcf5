"""The tiles of a batch: some consecutive tokens of one sample each, as many as the samples have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.layout_facts import HostCopy


class Tiles(NamedTuple):
    """Some consecutive tokens of one sample each; tiles of length 0 fill the list up."""

    start: Tensor  # int64 [n], first row of the sample in [T]
    length: Tensor  # int64 [n], tokens of the sample, 0 for a tile that is none
    history_end: Tensor  # int64 [n]
    first: Tensor  # int64 [n], first token; below 0 where tiles are counted from the end of the sample
    last: Tensor  # int64 [n], last token, inside the sample
    sample: Tensor  # int64 [n], which one; of a tile that is none, any


def tiles_of(layout: SequenceLayout, tile: int, tail: int | None = None, strip: int | None = None) -> Tiles:
    """`num_tiles_of` tiles, those of all samples first. `tail`, `strip`: see `row_work`."""
    return layout.memo(("tiles", tile, tail, strip), lambda: _new_tiles(layout, tile, tail, strip))


def num_tiles_of(layout: SequenceLayout, tile: int, tail: int | None = None, strip: int | None = None) -> int:
    """Of all samples; where the lengths are on the device only, as many as there may be."""
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
    """Some tiles in the middle of each sample, int64 [B] each; 0 where there is none."""

    first: Tensor | int
    count: Tensor | int


def rows_missing(lengths: Tensor, tile: int, strip: int | None) -> Tensor:
    """How many rows before each sample its first tile begins, whole strips."""
    return torch.zeros_like(lengths) if strip is None else -(-lengths // strip) * -strip % tile


def tiles_left_out(
    history_end: Tensor, contextual: int, tile: int, tail: int | None, missing: Tensor | int = 0
) -> LeftOut:
    """The tiles of nothing but history older than its newest `tail` tokens; `missing`: `rows_missing`."""
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
