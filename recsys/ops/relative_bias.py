"""Defines `RelativeBias`: attention scores that depend on how far apart two tokens are, in position and in
time.

`bias[i, j] = position_table[clamp(r_i - r_j, 0, P - 1)] + time_table[bucket(t_next(i) - t_j)]`, where `r` is
a token's index in its sample, except that every target (group) directly follows the history. So the output of
a candidate depends neither on the other candidates nor on their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_BUCKET = 0.301
"""Width of a time bucket in natural logarithms of seconds: each bucket spans a factor of about 1.35."""


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """Two small learned tables, and the times with which they are looked up.

    Attributes:
        position_table: float [P], or [H, P] with a row for each head.
        time_table: float [K] or [H, K], K time buckets.
        timestamps: int64 [T], time of each token in seconds.
        next_timestamps: int64 [T], time in seconds of the token after it; the request time for the last token
            and for targets.

    Raises:
        TypeError, ValueError: naming the field.
    """

    position_table: Tensor
    time_table: Tensor
    timestamps: Tensor
    next_timestamps: Tensor

    def __post_init__(self) -> None:
        for name in ("position_table", "time_table"):
            table = getattr(self, name)
            if not table.is_floating_point():
                raise TypeError(f"{name} must be a floating point tensor, got {table.dtype}")
            if table.dim() not in (1, 2) or table.shape[-1] == 0:
                raise ValueError(
                    f"{name} must have shape [buckets] or [heads, buckets], got {tuple(table.shape)}"
                )
        for name in ("timestamps", "next_timestamps"):
            _check_times(name, getattr(self, name))

    def with_cache(self, cache_timestamps: Tensor) -> CachedRelativeBias:
        """Return the bias for these tokens as new ones that also attend to cached tokens."""
        return CachedRelativeBias(
            self.position_table, self.time_table, self.timestamps, self.next_timestamps, cache_timestamps
        )


@dataclass(frozen=True, eq=False)
class CachedRelativeBias(RelativeBias):
    """Bias for `hstu_attention_cached`: `timestamps` and `next_timestamps` are those of the new tokens.

    Attributes:
        cache_timestamps: int64 [T_cache], time of each cached token in seconds. Cached tokens are keys only,
            so the times of the tokens after them are not needed.

    Raises:
        TypeError, ValueError: naming the field.
    """

    cache_timestamps: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_times("cache_timestamps", self.cache_timestamps)


def _check_times(name: str, times: Tensor) -> None:
    if times.dtype != torch.int64:
        raise TypeError(f"{name} must be int64 seconds (float32 resolves 128 s today), got {times.dtype}")
    if times.dim() != 1:
        raise ValueError(f"{name} must have shape [total_len], got {tuple(times.shape)}")


def time_bucket(seconds: Tensor, num_buckets: int) -> Tensor:
    """Return int32, same shape: `clamp(floor(log(max(1, |seconds|)) / 0.301), 0, num_buckets - 1)`.

    Args:
        seconds: whole seconds, int64 or (exact up to 2**53) float64. The logarithm is float64, too: in
            float32, the logarithm of a large integer can land on the wrong side of a bucket's edge.
    """
    logarithm = seconds.to(torch.float64).abs().clamp_(min=1).log_()
    return logarithm.div_(LOG_BUCKET).clamp_(max=num_buckets - 1).to(torch.int32)


def relative_positions(position: Tensor, history_end: Tensor, target_group_size: int) -> Tensor:
    """Return `r`: the `position` in the sample, where the targets of each group count from `history_end`
    on."""
    place = (position - history_end).clamp(min=0)
    return torch.where(position < history_end, position, history_end + place % target_group_size)


def dense_bias(
    bias: RelativeBias,
    query_position: Tensor,
    key_position: Tensor,
    next_timestamps: Tensor,
    timestamps: Tensor,
) -> Tensor:
    """Return float [1 or H, b, Q, K], query before key, for b padded samples.

    Args:
        query_position, key_position: int64 [b or 1, Q] and [b or 1, K], from `relative_positions`.
        next_timestamps: int64 [b, Q], those of the queries, in seconds.
        timestamps: int64 [b, K], those of the keys, in seconds.
    """
    # Convert before broadcasting: [b, Q] costs less than [b, Q, K]. Seconds are exact in float64.
    distance = query_position.to(torch.int32)[:, :, None] - key_position.to(torch.int32)[:, None, :]
    distance = distance.clamp_(0, bias.position_table.shape[-1] - 1)
    elapsed = next_timestamps.to(torch.float64)[:, :, None] - timestamps.to(torch.float64)[:, None, :]
    bucket = time_bucket(elapsed, bias.time_table.shape[-1])
    return _look_up(bias.position_table, distance) + _look_up(bias.time_table, bucket)


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return `table` [K] or [H, K] at `index`, int32 [...], as [1 or H, ...]."""
    if table.dim() == 2:
        first = torch.arange(table.shape[0], dtype=torch.int32, device=table.device) * table.shape[1]
        index = index + first.view(-1, *[1] * index.dim())
    else:
        index = index[None]
    return table.flatten().index_select(0, index.flatten()).view(index.shape)
