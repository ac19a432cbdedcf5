"""Build the work lists of a batch: which blocks each tile works on, longest tile first.

A kernel assigns one program to a tile, which is a run of consecutive rows (or keys) of one sample. Tiles past
the end of a sample are not listed, so padding costs nothing, and the longest tiles start first, so that none
is left running alone at the end. For each tile the list names the blocks of keys (or rows) to visit: blocks
outside the window are left out, and blocks that need no mask are marked (see `reference`).

Two builders make the same lists, and neither waits for the host: `kernels` has kernels, on a GPU in eager
mode; `reference` uses plain PyTorch, everywhere else and in graphs that a compiler traces.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from recsys.ops.hstu_attention.work_list import reference
from recsys.ops.hstu_attention.work_list.reference import Tiling
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime import triton_support

_DEVICE_BUILDER = f"{__name__}.kernels"


def row_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None = None,
    tail: int | None = None,
    strip: int | None = None,
) -> Tensor:
    """Return int64 [n, NUM_COLUMNS]: tiles of `tile` rows, each with the blocks of `block` keys that it sees.

    Args:
        section: number of tokens whose keys and values fit into a cache. The samples, longest first, are then
            processed in sections of about that many tokens, and tiles are sorted by length only within a
            section.
        tail: leaves out the tiles that hold only history older than the newest `tail` tokens.
        strip: cuts tiles into strips of `strip` rows and counts tiles from the end of the sample, rounded up
            to whole strips. The last tile, whose rows see the most keys, then has no empty strips; the first
            tile begins a whole number of strips before the sample.
    """
    return layout.memo(
        ("row_work", mask, tile, block, section, tail, strip),
        lambda: builder(layout).row_work(mask, layout, Tiling(tile, block, section, tail, strip)),
    )


def key_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None = None,
    tail: int | None = None,
) -> Tensor:
    """Return int64 [n, NUM_COLUMNS]: tiles of `tile` keys, each with the blocks of `block` rows that see it.

    Args:
        section: as in `row_work`.
        tail: leaves out the blocks that hold only history older than the newest `tail` tokens, unless the
            tile has no other blocks.
    """
    return layout.memo(
        ("key_work", mask, tile, block, section, tail),
        lambda: builder(layout).key_work(mask, layout, Tiling(tile, block, section, tail)),
    )


def cached_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    cache_layout: SequenceLayout,
    tile: int,
    block: int,
    parts: int = 1,
) -> Tensor:
    """Return int64 [n, NUM_CACHED_COLUMNS]: tiles of `tile` new rows, each with the blocks of `block` cached
    keys and of `block` new keys that it sees.

    The cached keys of a sample are cut into `parts` equal parts, and each tile is listed once per part; its
    item for the last part also has the new keys.
    """
    return layout.memo(
        ("cached_work", mask, cache_layout, tile, block, parts),
        lambda: builder(layout).cached_work(mask, layout, cache_layout, tile, block, parts),
    )


def builder(layout: SequenceLayout) -> ModuleType:
    """Return the module that builds the lists of a layout.

    Kernels cannot run while a compiler traces an op: its tensors are of other types and hold no numbers.
    """
    is_real = type(layout.lengths) is Tensor and not torch.compiler.is_compiling()
    if layout.device.type == "cuda" and is_real:
        return triton_support.load(_DEVICE_BUILDER)
    return reference
