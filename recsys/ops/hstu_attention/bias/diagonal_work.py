"""The blocks of scores of a batch by their diagonals, for the gradients of a position table.

Plain PyTorch on the layout's device: nothing waits for the host, and a compiler can trace it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.hstu_attention.work_list.reference import tiles_of
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask

NEAR_TILES = 4
"""Blocks less than this many tiles behind the main diagonal are near it."""


class DiagonalWork(NamedTuple):
    """Blocks of scores in the order of their diagonals, those next to the main diagonal first.

    Diagonal `d` has the blocks whose first row is `(d + 1) * block - tile` tokens behind their first key.
    """

    items: Tensor  # int64 [n, 4], the first columns of an item of `row_work`: history only, last tiles first
    ends: Tensor  # int64 [diagonals], of the numbers of each diagonal's blocks, counted through all
    shifts: Tensor  # int64 [diagonals], from the number of a block to the item that has its rows
    first_diagonal: Tensor  # int64 [workers], that of the first block of each worker behind the near ones
    num_near: int  # so many diagonals, if there are so many, are each shared by all workers

    # The others are shared as one, so that a worker visits few diagonals. Near the main diagonal a block has
    # ten times as many time buckets, and is more work.


def diagonal_work(
    mask: AttentionMask, layout: SequenceLayout, tile: int, block: int, workers: int
) -> DiagonalWork:
    """Blocks of `tile` rows and `block` keys, `tile` a multiple of it, that some row sees something of.

    Of rows whose place in the bias is that in the sample, and that see nothing behind them: without tiles
    that have targets among their rows, or contextual tokens that read the history.
    """
    return layout.memo(
        ("diagonal_work", mask, tile, block, workers),
        lambda: _diagonal_work(mask, layout, tile, block, workers),
    )


def _diagonal_work(
    mask: AttentionMask, layout: SequenceLayout, tile: int, block: int, workers: int
) -> DiagonalWork:
    tiles = tiles_of(layout, tile)
    has_targets = (tiles.history_end < tiles.length) & (tiles.first + tile > tiles.history_end)
    kept = (tiles.length > 0) & ~has_targets
    if mask.contextual_reads_history:
        kept = kept & (tiles.first >= layout.num_contextual)
    first = torch.where(kept, tiles.first, -tile)  # on no diagonal
    order = torch.argsort(first, descending=True, stable=True)
    ascending = first.index_select(0, order).flip(0)

    def num_from(token: Tensor) -> Tensor:
        """int64, how many tiles begin at `token` or later."""
        return first.shape[0] - torch.searchsorted(ascending, token)

    num_diagonals = tile // block * ((layout.max_len + tile - 1) // tile)
    distance = (torch.arange(num_diagonals, device=layout.device) + 1) * block - tile
    skipped = torch.zeros_like(distance)
    if mask.window is not None:  # past the window only the first keys are seen
        always = (layout.num_contextual + mask.prefix + block - 1) // block
        outside = distance - block >= mask.window - 1
        skipped = torch.where(outside, num_from(distance + always * block), skipped)
    counts = (num_from(distance) - skipped).clamp(min=0)
    ends = counts.cumsum(0)
    num_near = NEAR_TILES * tile // block
    is_near = torch.arange(num_diagonals, device=layout.device) < num_near
    near = torch.where(is_near, counts, 0).sum(0, keepdim=True)
    shares = near + (ends[-1:] - near) * torch.arange(workers, device=layout.device) // workers
    return DiagonalWork(
        items=torch.stack(tiles[:4], dim=1).index_select(0, order),
        ends=ends,
        shifts=skipped - (ends - counts),
        first_diagonal=torch.searchsorted(ends, shares, right=True),
        num_near=num_near,
    )
