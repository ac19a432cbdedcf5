"""Compute facts of each token of a layout on a GPU, with two kernels that replace a dozen operations on [T]
each.

A program handles several tokens and looks up their samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops.jagged.layout_facts import LayoutFacts, Tokens
from recsys.ops.runtime.launch import launch

LANES = 512
"""Tokens per program."""


def tokens_of(layout: LayoutFacts) -> Tokens:
    """Return the per-token facts of a layout on a GPU."""
    total_len, batch_size = layout.total_len, layout.batch_size
    memory = torch.empty(4, total_len + total_len % 2, dtype=torch.int64, device=layout.device)
    tokens = Tokens(*memory[:, :total_len].unbind(0))  # at addresses divisible by 16
    if total_len == 0:
        return tokens
    launch(
        tokens_kernel,
        -(-total_len // LANES),
        (layout.offsets, layout.lengths, layout.num_targets, layout.num_targets.cumsum(0), *tokens),
        (
            total_len,
            batch_size,
            batch_size.bit_length(),
            layout.num_contextual,
            total_len - batch_size * layout.num_contextual - layout.total_targets,
        ),
        {"LANES": LANES, "num_warps": 4},
    )
    return tokens


def source_rows(
    layout: LayoutFacts, derived: LayoutFacts, first: Tensor, dropped: Tensor | None = None
) -> Tensor:
    """Return int64 [derived.total_len]: the row of `layout` that each token of `derived` comes from.

    Args:
        derived: has one run of tokens per sample.
        first: int64 [B], the position in the sample at which each run begins.
        dropped: int64 [B], number of tokens after the contextual ones that each run leaves out; None for
            none.
    """
    total_len, batch_size = derived.total_len, derived.batch_size
    index = torch.empty(total_len, dtype=torch.int64, device=layout.device)
    if total_len == 0:
        return index
    launch(
        source_kernel,
        -(-total_len // LANES),
        (derived.offsets, layout.offsets, first, first if dropped is None else dropped, index),
        (total_len, batch_size, batch_size.bit_length(), layout.num_contextual),
        {"DROPS": dropped is not None, "LANES": LANES, "num_warps": 4},
    )
    return index


@triton.jit
def _sample_of(offsets, token, inside, batch_size, steps):
    """Return the sample of each token, B past the last token; 2^steps > B."""
    low, high = token * 0, token * 0 + batch_size
    for _ in range(steps):
        middle = (low + high) // 2
        passed = tl.load(offsets + 1 + middle, mask=inside & (low < high), other=2**62) <= token
        low, high = tl.where(passed, middle + 1, low), tl.where(passed, high, middle)
    return low


@triton.jit(do_not_specialize=["total_len", "batch_size", "steps", "contextual", "history_rows"])
def tokens_kernel(
    offsets, lengths, num_targets, targets_until, sample_ids, positions, rows, tokens,
    total_len, batch_size, steps, contextual, history_rows,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write, for each token, its sample, its position, and its row in [contextual | history | targets] of all
    samples; and for each such row, its token.

    targets_until: [B], the running sum of `num_targets`. history_rows: number of history tokens of all
        samples.
    """
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = _sample_of(offsets, token, inside, batch_size, steps)
    is_real = inside & (sample < batch_size)
    start = tl.load(offsets + sample, mask=is_real, other=0)
    own_targets = tl.load(num_targets + sample, mask=is_real, other=0)
    history_end = tl.load(lengths + sample, mask=is_real, other=0) - own_targets
    targets = tl.load(targets_until + sample, mask=is_real, other=0) - own_targets  # in earlier samples
    position = token - start
    before = batch_size * contextual
    row = before + (start - sample * contextual - targets) + position - contextual
    row = tl.where(position < contextual, sample * contextual + position, row)
    row = tl.where(position >= history_end, before + history_rows + targets + position - history_end, row)
    tl.store(sample_ids + token, tl.minimum(sample, batch_size - 1), mask=inside)
    tl.store(positions + token, position, mask=inside)
    tl.store(rows + token, row, mask=inside)
    tl.store(tokens + row, token, mask=is_real & (row >= 0) & (row < total_len))


@triton.jit(do_not_specialize=["total_len", "batch_size", "steps", "contextual"])
def source_kernel(
    offsets, source_offsets, first, dropped, index,
    total_len, batch_size, steps, contextual,
    DROPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the index [total_len] that `source_rows` returns."""
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = _sample_of(offsets, token, inside, batch_size, steps)
    is_real = inside & (sample < batch_size)
    position = token - tl.load(offsets + sample, mask=is_real, other=0)
    source = tl.load(source_offsets + sample, mask=is_real, other=0) + position
    source += tl.load(first + sample, mask=is_real, other=0)
    if DROPS:
        missing = tl.load(dropped + sample, mask=is_real & (position >= contextual), other=0)
        source += missing
    tl.store(index + token, source, mask=inside)
