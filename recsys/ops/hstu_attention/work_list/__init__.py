"""The work lists of a batch: which blocks each of its tiles works on, longest tile first.

A kernel gives one program to a tile: some consecutive rows (or keys) of one sample. Tiles past the end of a
sample are not in the list, so padding costs nothing, and the longest tiles start first, so that no long one
is left alone at the end. For each tile the list says which blocks of keys (or rows) it has to visit: those
outside of the window are not among them, and those that need no mask are marked (see `columns`).

Two builders make the same lists, and neither waits for the host: `device`, kernels, on a GPU in eager mode;
`reference`, plain PyTorch, everywhere else and in graphs that a compiler traces.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from recsys.ops.hstu_attention.work_list import reference
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.runtime import triton_support

_DEVICE_BUILDER = f"{__name__}.device"


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
        section: how many tokens of keys and values fit into a cache. The samples, longest first, are then
            worked through in sections of about as many tokens, and the longest tile comes first only within
            its section.
        tail: leaves out the tiles that hold only history older than its newest `tail` tokens.
        strip: cuts tiles into strips of so many rows. A sample's last tile, whose rows see most keys, then
            has no empty strips; its first tile begins so many strips before the sample.
    """
    return layout.memo(
        ("row_work", mask, tile, block, section, tail, strip),
        lambda: builder(layout).row_work(mask, layout, tile, block, section, tail, strip),
    )


def key_work(
    mask: AttentionMask,
    layout: SequenceLayout,
    tile: int,
    block: int,
    section: int | None = None,
    tail: int | None = None,
) -> Tensor:
    """int64 [n, NUM_COLUMNS]: tiles of `tile` keys, each with the blocks of `block` rows that see it.

    Args:
        section: as in `row_work`.
        tail: leaves out the blocks that hold only history older than its newest `tail` tokens, as long as
            the tile has other blocks.
    """
    return layout.memo(
        ("key_work", mask, tile, block, section, tail),
        lambda: builder(layout).key_work(mask, layout, tile, block, section, tail),
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
    and the blocks of `block` new keys that it sees.

    Each tile is listed once for each of `parts` equal parts of its sample's cached keys; its item for the
    last part has the new keys, too.
    """
    return layout.memo(
        ("cached_work", mask, cache_layout, tile, block, parts),
        lambda: builder(layout).cached_work(mask, layout, cache_layout, tile, block, parts),
    )


def builder(layout: SequenceLayout) -> ModuleType:
    """Return the module that builds the lists of a layout.

    Where a compiler looks into an op, tensors are of other types and hold no numbers: kernels cannot run.
    """
    is_real = type(layout.lengths) is Tensor and not torch.compiler.is_compiling()
    if layout.device.type == "cuda" and is_real:
        return triton_support.load(_DEVICE_BUILDER)
    return reference
