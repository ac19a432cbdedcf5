"""Computes times and table rows of tokens on a GPU, by two kernels that each replace a dozen operations.

`preprocessors.views` and `positional` compute the same by PyTorch's operations; tests compare every value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recsys.ops import SequenceLayout
from recsys.ops.runtime.launch import launch

LANES = 512
"""Tokens per program."""


def times_of(
    layout: SequenceLayout, request_times: Tensor, events: Tensor, candidates: Tensor, tokens_per_event: int
) -> Tensor:
    """Returns the times of each token, of the next token and of the request, int64 [T, 3], seconds.

    Args:
        request_times: int64 [B], seconds; the time of each sample's request.
        events: int64 [n], seconds; the time of each history event, which has `tokens_per_event` tokens (1 or
            2).
        candidates: int64 [N], seconds; the time of each target.
    """
    total_len = layout.total_len
    times = torch.empty(total_len, 3, dtype=torch.int64, device=layout.device)
    if total_len == 0:
        return times
    first = layout.batch_size * layout.num_contextual
    launch(
        times_kernel,
        -(-total_len // LANES),
        (
            layout.assemble_index(),
            layout.sample_ids(),
            layout.positions(),
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
    """Describes the conversion of ages to rows of the time table."""

    num_buckets: int
    unit: int  # seconds
    logarithmic: bool


def buckets_of(
    layout: SequenceLayout,
    times: Tensor,
    request_times: Tensor,
    num_positions: int,
    *,
    from_start: bool,
    scale: TimeScale | None,
) -> list[Tensor]:
    """Returns rows of the position table and, with a `scale`, rows of the time table, int64 [T] each.

    Args:
        times, request_times: int64 [T], seconds, any stride.
        num_positions: number of rows of the position table.
        from_start: whether history positions count from the oldest event on (see `PositionalEncoder`).
        scale: how ages are converted to rows of the time table; None if there is no such table.
    """
    total_len = layout.total_len
    rows = [torch.empty(total_len, dtype=torch.int64, device=layout.device) for _ in range(1 + bool(scale))]
    if total_len == 0:
        return rows
    num_buckets, unit, logarithmic = scale or (0, 1, False)
    launch(
        buckets_kernel,
        -(-total_len // LANES),
        (
            layout.sample_ids(),
            layout.positions(),
            layout.lengths,
            layout.num_targets,
            times,
            request_times,
            rows[0],
            rows[-1],
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
    return rows


@triton.jit(do_not_specialize=["total_len", "first_event", "first_candidate"])
def times_kernel(
    rows, sample_ids, positions, lengths, num_targets, request_times, events, candidates, times,
    total_len, first_event, first_candidate,
    PER_EVENT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes times [total_len, 3]: those of the token, of the next token and of the request, in seconds.

    `rows` comes from `SequenceLayout.assemble_index`: rows from `first_event` on belong to events, PER_EVENT
    rows each, and rows from `first_candidate` on to candidates.
    """
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = tl.load(sample_ids + token, mask=inside, other=0)
    row = tl.load(rows + token, mask=inside, other=0)
    position = tl.load(positions + token, mask=inside, other=0)
    history_end = tl.load(lengths + sample, mask=inside, other=0)
    history_end -= tl.load(num_targets + sample, mask=inside, other=0)
    asked = tl.load(request_times + sample, mask=inside, other=0)
    is_event = inside & (row >= first_event) & (row < first_candidate)
    is_candidate = inside & (row >= first_candidate)
    event = (row - first_event) // PER_EVENT
    event_time = tl.load(events + event, mask=is_event, other=0)
    # An event's content token is followed by its action token, at the same time.
    is_last_of_event = (row - first_event) % PER_EVENT == PER_EVENT - 1
    has_next = is_event & is_last_of_event & (position + 1 < history_end)
    after = tl.load(events + event + 1, mask=has_next, other=0)
    after = tl.where(has_next, after, tl.where(is_last_of_event, asked, event_time))
    wanted = tl.load(candidates + row - first_candidate, mask=is_candidate, other=0)
    place = times + token * 3
    tl.store(place, tl.where(is_candidate, wanted, tl.where(is_event, event_time, asked)), mask=inside)
    tl.store(place + 1, tl.where(is_candidate, wanted, tl.where(is_event, after, asked)), mask=inside)
    tl.store(place + 2, tl.where(is_candidate, wanted, asked), mask=inside)


@triton.jit(
    do_not_specialize=[
        "total_len",
        "contextual",
        "last_position",
        "num_buckets",
        "unit",
        "stride",
        "stride_of_requests",
    ]
)
def buckets_kernel(
    sample_ids, positions, lengths, num_targets, times, request_times, of_position, of_time,
    total_len, contextual, last_position, num_buckets, unit, stride, stride_of_requests,
    FROM_START: tl.constexpr, TIMED: tl.constexpr, LOGARITHMIC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Writes of_position and of_time [total_len], rows of the tables of `PositionalEncoder`."""
    token = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    inside = token < total_len
    sample = tl.load(sample_ids + token, mask=inside, other=0)
    index = tl.load(positions + token, mask=inside, other=0)
    history_end = tl.load(lengths + sample, mask=inside, other=0)
    history_end -= tl.load(num_targets + sample, mask=inside, other=0)
    position = tl.minimum(index, history_end)
    if not FROM_START:
        position = tl.where(index < contextual, index, contextual + history_end - position)
    tl.store(of_position + token, tl.minimum(position, last_position), mask=inside)
    if TIMED:
        age = tl.load(request_times + token * stride_of_requests, mask=inside, other=0)
        age -= tl.load(times + token * stride, mask=inside, other=0)
        units = age.to(tl.float64) / (token * 0 + unit).to(tl.float64)
        if LOGARITHMIC:
            bucket = tl.log(tl.maximum(units, 1.0)).to(tl.int64)
        else:
            bucket = tl.sqrt(tl.maximum(units, 0.0)).to(tl.int64)
        bucket = tl.where(index < contextual, num_buckets, tl.minimum(bucket, num_buckets - 1))
        tl.store(of_time + token, bucket, mask=inside)
