"""`DistanceChannel`: weighs tokens in linear attention by their distance, in seconds or in tokens.

The weight of event j for token i is a learned function of their distance d, a sum of damped waves
`exp(-rate_p d) (a_p cos(2 pi d / p) + b_p sin(2 pi d / p))` over periods p. Since cos and sin of a difference
are sums of products, this is a linear attention whose queries and keys are clock readings; the content of
tokens plays no part. Source: the temporal and positional channels of FuXi-Linear, arXiv 2602.23671; here
positions are relative and each head has its own sum of waves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout

TIME_PERIODS = (60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000, 31_536_000)
"""Periods in seconds: a minute, ten minutes, an hour, six hours, a day, a week, thirty days, a year."""

POSITION_PERIODS = (2, 4, 8, 16, 64, 128, 256, 1_024)
"""Periods in tokens."""

STRONGEST_DECAY = 20.0
"""No step multiplies a state by less than exp(-20), which float32 sums cannot distinguish from 0."""


class Clock(NamedTuple):
    """The readings of a clock at each token, in float32 or wider.

    Attributes:
        keys: [T, 2 P], cos and sin of each period at the token; zeros for a token that must not be read.
        queries: [T, 2 P], cos and sin of each period at the moment of the token's query.
        turned: [T, 2 P], sin and -cos of each period at that moment.
        elapsed: [T, 1], distance from the previous token to this token.
        ahead: [T, 1], distance from this token to the moment of its query.
    """

    keys: Tensor
    queries: Tensor
    turned: Tensor
    elapsed: Tensor
    ahead: Tensor


class Weights(NamedTuple):
    """Queries, keys and log decays of `linear_attention`, [T, H, 2 P] each."""

    queries: Tensor
    keys: Tensor
    log_decay: Tensor


class Past(NamedTuple):
    """The contextual and history tokens that precede each of B samples, as far as clocks read them.

    Attributes:
        lengths: int64 [B], number of tokens.
        num_contextual: number of contextual tokens among them.
        newest: int64 [B], the time of the newest event in seconds, any number where there is no event; None
            if no clock reads times.
    """

    lengths: Tensor
    num_contextual: int
    newest: Tensor | None


def time_clock(sequence: JaggedSequence, periods: Tensor, past: Past | None = None) -> Clock:
    """Reads the times of tokens in seconds; a token's query is the time of the next token.

    Contextual tokens have no time, so no token reads them, and their distances are 0.

    Args:
        sequence: whole samples, or targets alone or events alone if `past` is given.
        periods: P periods in seconds.
        past: the tokens before those of the sequence.
    """
    layout, times, wanted = sequence.layout, sequence.timestamps, sequence.next_timestamps
    is_contextual = layout.positions() < layout.num_contextual
    before = times.index_select(0, _row_before(layout))
    if past is not None and past.newest is not None:
        sample = layout.sample_ids()
        has_events = (past.lengths > past.num_contextual).index_select(0, sample)
        follows = has_events & (_place(layout) == 0)
        before = torch.where(follows, past.newest.index_select(0, sample), before)
    elapsed = torch.where(is_contextual, 0, times - before)
    ahead = torch.where(is_contextual, 0, wanted - times)
    return _clock(sequence.values, periods, times, wanted, elapsed, ahead, ~is_contextual)


def position_clock(sequence: JaggedSequence, periods: Tensor, past: Past | None = None) -> Clock:
    """Reads positions in tokens; all targets have the same position, directly after the history.

    The arguments are those of `time_clock`, with periods in tokens.
    """
    layout = sequence.layout
    place = _place(layout)
    if past is not None:
        place = place + past.lengths.index_select(0, layout.sample_ids())
    step, nothing = place.clamp(max=1), torch.zeros_like(place)
    return _clock(sequence.values, periods, place, place, step, nothing, place >= 0)


def _place(layout: SequenceLayout) -> Tensor:
    """Returns the position of each token in its sample, int64 [T]; the end of the history for targets."""
    end = layout.history_end.index_select(0, layout.sample_ids())
    return torch.minimum(layout.positions(), end)


def _row_before(layout: SequenceLayout) -> Tensor:
    """Returns the row of the event before each event, and of the newest event for a target, int64 [T].

    The first event of a sample and a target without history get their own row.
    """
    positions, sample = layout.positions(), layout.sample_ids()
    end = layout.history_end.index_select(0, sample)
    before = torch.minimum(positions, end) - 1
    before = torch.where(before < layout.num_contextual, positions, before)
    return layout.offsets.index_select(0, sample) + before


def _clock(
    values: Tensor,
    periods: Tensor,
    at: Tensor,
    wanted: Tensor,
    elapsed: Tensor,
    ahead: Tensor,
    is_read: Tensor,
) -> Clock:
    """Reads integer times. Their remainders are exact, while float32 would round current times to 128 s."""
    real = torch.promote_types(values.dtype, torch.float32)

    def angle(times: Tensor) -> Tensor:
        return torch.remainder(times[:, None], periods).to(real) * (2 * math.pi / periods.to(real))

    key, query = angle(at), angle(wanted)
    keys = torch.cat([key.cos(), key.sin()], dim=1) * is_read[:, None].to(real)
    distances = [distance.clamp(min=0).to(real)[:, None] for distance in (elapsed, ahead)]
    return Clock(
        keys,
        torch.cat([query.cos(), query.sin()], dim=1),
        torch.cat([query.sin(), -query.cos()], dim=1),
        *distances,
    )


class DistanceChannel(nn.Module):
    """The learned waves of one clock in one layer.

    Args:
        periods: P periods in the unit of the clock.
        num_heads: H, each with its own sum of waves.
    """

    def __init__(self, periods: Sequence[int], num_heads: int):
        super().__init__()
        self.num_periods = len(periods)
        # Initially a wave decays to half of its strength within one period.
        slowest = torch.tensor([math.log(2) / period for period in periods])
        self.register_buffer("first_rate", slowest, persistent=False)
        self.log_rate = nn.Parameter(torch.zeros(len(periods)))
        self.even = nn.Parameter(torch.empty(num_heads, len(periods)))
        self.odd = nn.Parameter(torch.empty(num_heads, len(periods)))
        for weight in (self.even, self.odd):
            nn.init.normal_(weight, std=len(periods) ** -0.5)

    def forward(self, clock: Clock) -> Weights:
        """Computes the inputs of `linear_attention` that depend on the clock."""
        rate = (self.first_rate * self.log_rate.exp()).repeat(2).to(clock.keys.dtype)
        even, odd = (weight.repeat(1, 2).to(clock.keys.dtype) for weight in (self.even, self.odd))
        decay = (-rate * clock.ahead).clamp(min=-STRONGEST_DECAY).exp()
        queries = (decay * clock.queries)[:, None] * even + (decay * clock.turned)[:, None] * odd
        decays = (-rate * clock.elapsed).clamp(min=-STRONGEST_DECAY)
        heads = even.shape[0]
        keys, decays = (part[:, None].expand(-1, heads, -1) for part in (clock.keys, decays))
        return Weights(queries, keys, decays)
