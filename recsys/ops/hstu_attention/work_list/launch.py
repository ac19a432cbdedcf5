"""Work lists of a batch from two kernels, in place of some hundred operations on small tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.hstu_attention.work_list.cached_kernel import cached_items_kernel
from recsys.ops.hstu_attention.work_list.kernel import NUM_COLUMNS, items_kernel, order_kernel
from recsys.ops.hstu_attention.work_list.reference import NUM_CACHED_COLUMNS, sections_of
from recsys.ops.hstu_attention.work_list.tiles import num_tiles_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime.launch import start

LANES, CACHED_LANES = 128, 64
"""Tiles of a program, and where there is a cache."""

SAMPLES = 32
"""That it looks at, at a time, for those of its tiles."""

ORDERED, OTHERS = 32, 256
"""Tiles of a program that puts them in order, and of those that it compares them with at a time."""

MOST_COMPARED = 2**14
"""Tiles, above which comparing each with each takes longer than a sort."""


def items_of(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None,
    tail: int | None = None,
    strip: int | None = None,
    *,
    keys: bool,
) -> Tensor:
    """What `work_list.row_work` returns, or `key_work`."""
    # Of keys no tile is left out, but blocks that they would visit.
    device, num_tiles = layout.device, num_tiles_of(layout, tile, None if keys else tail, strip)
    items = torch.empty(num_tiles, NUM_COLUMNS.value, dtype=torch.int64, device=device)
    if num_tiles == 0:
        return items
    sections = None if section is None else sections_of(layout.lengths, section)
    order_by = torch.empty(num_tiles, dtype=torch.int64, device=device)
    start(
        items_kernel,
        -(-num_tiles // LANES),
        (
            layout.offsets,
            layout.lengths,
            layout.num_targets,
            layout.lengths if sections is None else sections,
            items,
            order_by,
        ),
        (
            num_tiles,
            layout.batch_size,
            layout.num_contextual,
            mask.window or 0,
            mask.prefix,
            mask.target_group_size,
            layout.total_len,
            tail or 0,
        ),
        {
            "KEYS": keys,
            "TILE": tile,
            "STRIP": strip or tile,
            "BLOCK": block,
            "SECTIONED": sections is not None,
            "WINDOWED": mask.window is not None,
            "TARGET_WINDOW": mask.target_window,
            "CONTEXTUAL_READS": mask.contextual_reads_history,
            "TAIL": tail is not None,
            "LANES": LANES,
            "SAMPLES": SAMPLES,
            "num_warps": 4,
        },
    )
    return _in_order(items, order_by)


def cached_items_of(
    mask: AttentionMask,
    layout: SequenceLayout,
    cache_layout: SequenceLayout,
    tile: int,
    block: int,
    parts: int,
) -> Tensor:
    """What `work_list.cached_work` returns."""
    device, num_items = layout.device, num_tiles_of(layout, tile) * parts
    items = torch.empty(num_items, NUM_CACHED_COLUMNS, dtype=torch.int64, device=device)
    if num_items == 0:
        return items
    order_by = torch.empty(num_items, dtype=torch.int64, device=device)
    start(
        cached_items_kernel,
        -(-num_items // CACHED_LANES),
        (
            layout.offsets,
            layout.lengths,
            layout.num_targets,
            cache_layout.offsets,
            cache_layout.lengths,
            items,
            order_by,
        ),
        (
            num_items,
            layout.batch_size,
            cache_layout.num_contextual,
            mask.window or 0,
            mask.prefix,
            mask.target_group_size,
            parts,
        ),
        {
            "TILE": tile,
            "BLOCK": block,
            "WINDOWED": mask.window is not None,
            "TARGET_WINDOW": mask.target_window,
            "CONTEXTUAL_READS": mask.contextual_reads_history,
            "LANES": CACHED_LANES,
            "SAMPLES": SAMPLES,
            "num_warps": 4,
        },
    )
    return _in_order(items, order_by)


def _in_order(items: Tensor, order_by: Tensor) -> Tensor:
    """The items with the largest number first, equals as they were."""
    num_tiles = items.shape[0]
    if num_tiles > MOST_COMPARED:
        return items.index_select(0, torch.argsort(order_by, descending=True, stable=True))
    ordered = torch.empty_like(items)
    start(
        order_kernel,
        -(-num_tiles // ORDERED),
        (items, order_by, ordered),
        (num_tiles,),
        {
            "COLUMNS": items.shape[1],
            "PADDED": 1 << (items.shape[1] - 1).bit_length(),
            "LANES": ORDERED,
            "OTHERS": OTHERS,
            "num_warps": 4,
        },
    )
    return ordered
