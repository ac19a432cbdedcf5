"""Launches the kernels of `top_k`, chunk by chunk of the queries and of the catalog."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from recsys.ops.runtime.triton_support import block_width, num_processors
from recsys.ops.top_k import TopK
from recsys.ops.top_k.keys import items_of, scores_of
from recsys.ops.top_k.triton_kernels import choose_kernel, coarse_kernel, measure_kernel, round_kernel


class Blocks(NamedTuple):
    """Sizes of `coarse_kernel`."""

    queries: int  # queries per program
    group: int  # items per group, of which only the largest score is stored
    num_warps: int
    num_stages: int


BLOCKS = {
    64: Blocks(256, 128, 8, 3),
    128: Blocks(256, 128, 8, 3),
    256: Blocks(128, 64, 8, 3),
    512: Blocks(64, 64, 4, 2),
}
"""Sizes by padded width in columns."""

CHUNK_QUERIES = 4096
"""Queries processed at a time."""

CHUNK_BYTES = 512 * 2**20
"""Byte limit for the largest scores of a chunk's groups, and again for the chunk's rounded items."""

CHUNK_ITEMS = 2**30
"""Most items per chunk, so that 32 bits number its rows."""

PART = 64
"""Groups per program: many, so that queries are loaded rarely, but few enough for programs to end
together."""

CLASSES = 1024
"""Groups whose bounds a program compares per step."""

STEP = 32
"""Columns of a group that are summed per step."""

WARPS = 4
"""Warps per program of `measure_kernel` or `choose_kernel`."""

REMOVED = 256
"""Removed items that are compared per step."""

SUM_ERROR = 2.0**-21
"""Error bound per product of an n-term dot product, relative to the sum of the products' magnitudes. It
covers two sums: on tensor cores, which truncate instead of rounding, n 2^-22 is twice the measured error
(Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ CS 2021); float32 sums in any order stay below
n 2^-23."""

MOST_BITS = 120
"""Exponent limit: queries are scaled by powers of 2 from 2^-MOST_BITS to 2^MOST_BITS."""


class Rounded(NamedTuple):
    """16-bit queries and the facts for bounds that `round_kernel` writes."""

    rows: Tensor
    """[B, E'], 16 bits per entry; E' is a multiple of 8."""
    facts: Tensor
    """[B, 3] float32, see `round_kernel`."""
    share: Tensor
    """[1] float32, see `round_kernel`."""


def run(queries: Tensor, items: Tensor, k: int, removed: Tensor, removed_lengths: Tensor) -> TopK:
    """Runs `top_k`; the arguments have been validated."""
    if not len(queries) or not len(items):
        scores = torch.full((len(queries), k), -torch.inf, device=queries.device)
        return TopK(scores, torch.full_like(scores, -1, dtype=torch.int64))
    queries, items = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (queries, items))
    rounded = round_queries(queries, torch.bfloat16 if items.dtype == torch.bfloat16 else torch.float16)
    best = torch.empty(len(queries), block_width(k), dtype=torch.int64, device=queries.device)
    on_device = Removed(removed, removed_lengths, queries.device)
    for start in range(0, len(queries), CHUNK_QUERIES):
        chunk = slice(start, start + CHUNK_QUERIES)
        part = Rounded(rounded.rows[chunk], rounded.facts[chunk], rounded.share)
        _search(_Search(queries[chunk], items, k, part, on_device, start, best[chunk]))
    best = best[:, :k].sort(dim=1, descending=True).values
    scores = scores_of(best)
    return TopK(scores, items_of(best).masked_fill(scores == -torch.inf, -1))


class Removed:
    """Removed items on the device, copied at first use, when the device is already busy."""

    def __init__(self, items: Tensor, lengths: Tensor, device: torch.device) -> None:
        self._items, self._lengths, self._device = items, lengths, device

    @cached_property
    def _sent(self) -> Tensor:
        """Offsets and items, int64 [E + R]; E is B + 1 rounded up to even, so that the items begin at a
        multiple of 16 bytes.

        The memory is pinned: a copy from pageable memory would wait for all work queued on the device. NumPy
        fills it: PyTorch copies 32,768 numbers or more with several threads, which took 10 ms and more on a
        host with shared cores.
        """
        first = _up(len(self._lengths) + 1, 2)
        pinned = self._device.type == "cuda"
        packed = torch.empty(first + len(self._items), dtype=torch.int64, pin_memory=pinned)
        numbers = packed.numpy()
        numbers[:1] = 0
        numbers[1 : len(self._lengths) + 1] = self._lengths.numpy().cumsum()
        numbers[first:] = self._items.numpy()
        return packed.to(self._device, non_blocking=True)

    @property
    def items(self) -> Tensor:
        """int64 [R], the removed items."""
        return self._sent[_up(len(self._lengths) + 1, 2) :]

    @property
    def offsets(self) -> Tensor:
        """int64 [B + 1], the first removed item of each query, and the end."""
        return self._sent[: len(self._lengths) + 1]


class _Search(NamedTuple):
    queries: Tensor
    items: Tensor
    k: int
    rounded: Rounded
    removed: Removed
    first_query: int
    best: Tensor


def _search(search: _Search) -> None:
    """Merges the best of all items into `best`, chunk by chunk."""
    items, device = search.items, search.items.device
    copied = not _is_ready(items)
    columns = search.rounded.rows.shape[1]
    blocks = BLOCKS[padded_width(int(items.shape[1]))]
    chunk = chunk_of(len(search.queries), 2 * columns if copied else 0, len(items), blocks.group)
    groups = _up(chunk, blocks.group) // blocks.group
    maxima = torch.empty(len(search.queries) * _up(groups, 16), dtype=torch.int32, device=device)
    widths = torch.empty(groups, dtype=torch.float32, device=device)
    copies = torch.empty(chunk if copied else 0, columns, dtype=search.rounded.rows.dtype, device=device)
    for first in range(0, len(items), chunk):
        part = items[first : first + chunk]
        groups = _up(len(part), blocks.group) // blocks.group
        rows = copies[: len(part)] if copied else part
        measure(part, rows, widths, search.rounded.share, blocks.group)
        scores = maxima[: len(search.queries) * _up(groups, 16)].view(len(search.queries), -1)
        launch_coarse(search.rounded.rows, rows, scores, groups, blocks)
        choose(search, scores, widths, first, len(part), blocks.group)


def chunk_of(num_queries: int, item_bytes: int, num_items: int, group: int) -> int:
    """Returns the number of items per chunk: whole groups, with chunks of about equal size.

    Args:
        item_bytes: bytes of an item's rounded copy; 0 without copies.
    """
    most = min(CHUNK_BYTES // (4 * num_queries) * group, CHUNK_ITEMS)
    if item_bytes:
        most = min(most, CHUNK_BYTES // item_bytes)
    most = max(most // group, 1) * group
    chunks = -(-num_items // most)
    return _up(-(-num_items // chunks), group)


def round_queries(queries: Tensor, dtype: torch.dtype) -> Rounded:
    """Launches `round_kernel`."""
    width = int(queries.shape[1])
    rows = queries.new_empty(len(queries), _up(width, 8), dtype=dtype)
    rounded = Rounded(rows, queries.new_empty(len(queries), 3), queries.new_zeros(1))
    round_kernel[(len(queries),)](
        queries,
        *rounded,
        queries.stride(0),
        rows.stride(0),
        SUM_ERROR * width,
        D=width,
        BLOCK_D=padded_width(width),
        MOST_BITS=MOST_BITS,
        num_warps=1,
    )
    return rounded


def measure(items: Tensor, rows: Tensor, widths: Tensor, share: Tensor, group: int) -> None:
    """Writes the bounds of groups to `widths`, and rounded items to `rows` unless `rows` are the items."""
    width = int(items.shape[1])
    measure_kernel[(_up(len(items), group) // group,)](
        items,
        rows,
        widths,
        share,
        len(items),
        items.stride(0),
        rows.stride(0),
        D=width,
        BLOCK_D=padded_width(width),
        STEP=STEP,
        GROUP=group,
        COPIED=rows is not items,
        num_warps=WARPS,
    )


def launch_coarse(rows: Tensor, items: Tensor, maxima: Tensor, num_groups: int, blocks: Blocks) -> None:
    """Launches `coarse_kernel`, which writes the largest score of each group to `maxima`."""
    columns = padded_width(rows.shape[1])
    tiles = -(-len(rows) // blocks.queries)
    per_part = part_of(tiles, num_groups, items.device)
    coarse_kernel[(tiles * -(-num_groups // per_part),)](
        TensorDescriptor.from_tensor(rows, [blocks.queries, columns]),
        TensorDescriptor.from_tensor(items, [blocks.group, columns]),
        maxima,
        len(rows),
        num_groups,
        per_part,
        maxima.stride(0),
        BLOCK_M=blocks.queries,
        GROUP=blocks.group,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def part_of(tiles: int, num_groups: int, device: torch.device) -> int:
    """Returns the number of groups per program: fewer than `PART` where there would be too few programs."""
    programs = 8 * num_processors(device)
    return max(1, min(PART, tiles * num_groups // programs))


def choose(search: _Search, maxima: Tensor, widths: Tensor, first: int, num_items: int, group: int) -> None:
    """Scores the groups of a chunk that may hold one of the best items, and updates `best`."""
    width, items = int(search.items.shape[1]), search.items[first : first + num_items]
    choose_kernel[(len(search.queries),)](
        maxima,
        widths,
        search.queries,
        search.rounded.facts,
        items,
        search.removed.items,
        search.removed.offsets[search.first_query :],
        search.best,
        first,
        num_items,
        _up(num_items, group) // group,
        search.k,
        maxima.stride(0),
        search.queries.stride(0),
        items.stride(0),
        D=width,
        BLOCK_D=padded_width(width),
        STEP=STEP,
        GROUP=group,
        K=search.best.shape[1],
        CLASSES=CLASSES,
        REMOVED=REMOVED,
        num_warps=WARPS,
    )


def padded_width(width: int) -> int:
    """Returns the columns of a block that holds whole rows."""
    return block_width(width, least=64)


def _is_ready(items: Tensor) -> bool:
    """Returns True if items can be multiplied without a copy: 16 bits, rows at multiples of 16 bytes."""
    aligned = items.data_ptr() % 16 == 0 and items.stride(0) * items.element_size() % 16 == 0
    return items.dtype.itemsize == 2 and aligned


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
