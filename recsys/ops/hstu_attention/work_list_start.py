"""Work lists of a batch from one kernel and a sort, in place of some hundred operations on small tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.hstu_attention.work_list import num_tiles_of, sections_of, tiles_left_out
from recsys.ops.hstu_attention.work_list_kernel import NUM_COLUMNS, items_kernel
from recsys.ops.layout import SequenceLayout
from recsys.ops.mask import AttentionMask
from recsys.ops.triton_start import start

LANES = 128
"""Tiles of a program."""


def items_of(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None,
    tail: int | None = None,
    *,
    keys: bool,
) -> Tensor:
    """What `work_list.row_work` returns, or `key_work`."""
    left_out = None if keys else tail  # of keys no tile is left out, but blocks that they would visit
    device, num_tiles = layout.device, num_tiles_of(layout, tile, left_out)
    items = torch.empty(num_tiles, NUM_COLUMNS.value, dtype=torch.int64, device=device)
    if num_tiles == 0:
        return items
    sections = None if section is None else sections_of(layout.lengths, section)
    order_by = torch.empty(num_tiles, dtype=torch.int64, device=device)
    counts = (layout.lengths + tile - 1) // tile
    if left_out is not None:
        counts = counts - tiles_left_out(layout.history_end, layout.num_contextual, tile, tail).count
    ends = counts.cumsum(0)
    start(
        items_kernel,
        -(-num_tiles // LANES),
        (
            layout.offsets,
            layout.lengths,
            layout.num_targets,
            ends,
            ends if sections is None else sections,
            items,
            order_by,
        ),
        (
            num_tiles,
            layout.batch_size,
            layout.batch_size.bit_length(),
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
            "BLOCK": block,
            "SECTIONED": sections is not None,
            "WINDOWED": mask.window is not None,
            "TARGET_WINDOW": mask.target_window,
            "CONTEXTUAL_READS": mask.contextual_reads_history,
            "TAIL": tail is not None,
            "LANES": LANES,
            "num_warps": 4,
        },
    )
    return items.index_select(0, torch.argsort(order_by, descending=True, stable=True))
