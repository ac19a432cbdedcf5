"""Starts the kernels of `layout_kernels`: one takes the place of a dozen operations on a number a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.jagged.layout_facts import LayoutFacts
from recsys.ops.jagged.layout_kernels import buckets_kernel, source_kernel, times_kernel, tokens_kernel
from recsys.ops.runtime.launch import start

LANES = 512
"""Tokens of a program."""


class Tokens(NamedTuple):
    """int64 [T] each; see the methods of `SequenceLayout` of these names."""

    sample_ids: Tensor
    positions: Tensor
    assemble_index: Tensor
    disassemble_index: Tensor


def tokens_of(layout: LayoutFacts) -> Tokens:
    """What a layout on a GPU says of each token."""
    total_len, batch_size = layout.total_len, layout.batch_size
    memory = torch.empty(4, total_len + total_len % 2, dtype=torch.int64, device=layout.device)
    made = Tokens(*memory[:, :total_len].unbind(0))  # at addresses that 16 divides
    if total_len == 0:
        return made
    start(
        tokens_kernel,
        -(-total_len // LANES),
        (layout.offsets, layout.lengths, layout.num_targets, layout.num_targets.cumsum(0), *made),
        (
            total_len,
            batch_size,
            batch_size.bit_length(),
            layout.num_contextual,
            total_len - batch_size * layout.num_contextual - layout.total_targets,
        ),
        {"LANES": LANES, "num_warps": 4},
    )
    return made


def source_rows(
    layout: LayoutFacts, derived: LayoutFacts, first: Tensor, dropped: Tensor | None = None
) -> Tensor:
    """int64 [T of `derived`]: rows of `layout`. See `source_kernel`."""
    total_len, batch_size = derived.total_len, derived.batch_size
    index = torch.empty(total_len, dtype=torch.int64, device=layout.device)
    if total_len == 0:
        return index
    start(
        source_kernel,
        -(-total_len // LANES),
        (derived.offsets, layout.offsets, first, first if dropped is None else dropped, index),
        (total_len, batch_size, batch_size.bit_length(), layout.num_contextual),
        {"DROPS": dropped is not None, "LANES": LANES, "num_warps": 4},
    )
    return index


def times_of(
    layout: LayoutFacts, request_times: Tensor, events: Tensor, candidates: Tensor, tokens_per_event: int
) -> Tensor:
    """int64 [T, 3], seconds: each token's own time, that of the token after it, and its request's.

    Args:
        request_times: int64 [B].
        events: int64 [n], of the history, `tokens_per_event` tokens each (1 or 2).
        candidates: int64 [N], of the targets.
    """
    tokens, total_len = layout._tokens(), layout.total_len
    times = torch.empty(total_len, 3, dtype=torch.int64, device=layout.device)
    if total_len == 0:
        return times
    first = layout.batch_size * layout.num_contextual
    start(
        times_kernel,
        -(-total_len // LANES),
        (
            tokens.assemble_index,
            tokens.sample_ids,
            tokens.positions,
            layout.lengths,
            layout.num_targets,
            request_times,
            events,
            candidates,
            times,
        ),
        (total_len, first, total_len - layout.total_targets),
        {"PER_EVENT": tokens_per_event, "LANES": LANES, "num_warps": 4},
    )
    return times


class TimeScale(NamedTuple):
    """How ages become rows of a table."""

    num_buckets: int
    unit: int  # seconds
    logarithmic: bool


def buckets_of(
    layout: LayoutFacts,
    times: Tensor,
    request_times: Tensor,
    num_positions: int,
    *,
    from_start: bool,
    scale: TimeScale | None,
) -> list[Tensor]:
    """int64 [T] each: rows of the position table and, with a `scale`, of the time table. See
    `recsys.modules.positional`.

    Args:
        times, request_times: int64 [T], seconds, any stride.
    """
    tokens, total_len = layout._tokens(), layout.total_len
    made = [torch.empty(total_len, dtype=torch.int64, device=layout.device) for _ in range(1 + bool(scale))]
    if total_len == 0:
        return made
    num_buckets, unit, logarithmic = scale or (0, 1, False)
    start(
        buckets_kernel,
        -(-total_len // LANES),
        (
            tokens.sample_ids,
            tokens.positions,
            layout.lengths,
            layout.num_targets,
            times,
            request_times,
            made[0],
            made[-1],
        ),
        (
            total_len,
            layout.num_contextual,
            num_positions - 1,
            num_buckets,
            unit,
            times.stride(0),
            request_times.stride(0),
        ),
        {
            "FROM_START": from_start,
            "TIMED": scale is not None,
            "LOGARITHMIC": logarithmic,
            "LANES": LANES,
            "num_warps": 4,
        },
    )
    return made
