"""`RotaryPositions`: turns queries and keys by angles from a token's place and time before attention.

Each pair of numbers of a query or key is turned by 2 pi (place / p + time / t), with wavelengths p in tokens
and t in seconds. A score then depends on the distance of two tokens, since turning both by the same angle
changes nothing. Sources: RoPE, arXiv 2104.09864; TO-RoPE, arXiv 2510.20455, of whose forms this is early
fusion.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.mixers.batched_layers import Projections
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu_paths import KeysValues
from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.relative_bias import relative_positions

_Projected = TypeVar("_Projected", Projections, KeysValues)


class Rotation(NamedTuple):
    """Cosines and sines of the angles of T tokens as queries and as keys, [2, T, 1, D / 2] each."""

    query: Tensor
    key: Tensor


class RotaryPositions(nn.Module):
    """Computes the rotations of tokens; it has no parameters.

    Places and times follow the rule of `recsys.ops.RelativeBias`. The place is a token's index in its sample,
    after a truncation in the truncated one, and every target (group) directly follows the history. A key has
    the time of its token, a query that of the next token: for the last event, contextual tokens and targets
    the time of the request.

    Args:
        config: the message.
        width: D, an even number.
    """

    def __init__(self, config: pb.RotaryPositions, *, width: int):
        super().__init__()
        places = _periods(config.shortest_tokens, config.longest_tokens, width // 2)
        self.register_buffer("place_periods", places, persistent=False)
        self.timed = config.longest_seconds > 0
        if self.timed:
            times = _periods(config.shortest_seconds, config.longest_seconds, width // 2)
            self.register_buffer("time_periods", times, persistent=False)

    def forward(
        self, sequence: JaggedSequence, target_group_size: int, before: SequenceLayout | None = None
    ) -> Rotation:
        """Computes the rotation of all tokens.

        Args:
            sequence: whole samples, or targets alone or events alone if `before` is given.
            target_group_size: number of neighboring targets that form a group.
            before: the layout of the cached tokens that precede those of the sequence.
        """
        layout, sample = sequence.layout, sequence.layout.sample_ids()
        history_end = layout.history_end.index_select(0, sample)
        place = relative_positions(layout.positions(), history_end, target_group_size)
        if before is not None:
            place = place + before.lengths.index_select(0, sample)
        real = torch.promote_types(sequence.values.dtype, torch.float32)
        placed = _angles(place, self.place_periods, real)
        if not self.timed:
            return Rotation(*[_waves(placed)] * 2)
        times = (sequence.next_timestamps, sequence.timestamps)
        return Rotation(*(_waves(placed + _angles(column, self.time_periods, real)) for column in times))


class Rotations:
    """The rotations of one call of a stack, which layers that see the same tokens share.

    Args:
        rotary: computes them; None changes nothing.
    """

    def __init__(self, rotary: RotaryPositions | None):
        self.rotary = rotary
        self._known: dict[tuple, Rotation] = {}

    def apply(
        self,
        projected: _Projected,
        sequence: JaggedSequence,
        mask: AttentionMask,
        before: SequenceLayout | None = None,
    ) -> _Projected:
        """Turns the keys [T, H, D] and, if there are any, the queries of a layer; see `RotaryPositions`."""
        if self.rotary is None:
            return projected
        tokens = (sequence.layout, mask.target_group_size, before)
        if tokens not in self._known:
            self._known[tokens] = self.rotary(sequence, mask.target_group_size, before)
        rotation = self._known[tokens]
        turned = projected._replace(k=_turned(projected.k, *rotation.key))
        if isinstance(turned, KeysValues):
            return turned
        return turned._replace(q=_turned(turned.q, *rotation.query))


def _periods(shortest: int, longest: int, count: int) -> Tensor:
    """Returns int64 [count], from the shortest to the longest in equal ratios, in whole tokens or seconds."""
    steps = torch.linspace(math.log(shortest), math.log(longest), count, dtype=torch.float64)
    return steps.exp().round().to(torch.int64)


def _angles(readings: Tensor, periods: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [T, D / 2], below 2 pi. The remainders of integers are exact; float32 resolves 128 s today."""
    return torch.remainder(readings[:, None], periods).to(dtype) * (2 * math.pi / periods.to(dtype))


def _waves(angles: Tensor) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns number d of each head together with number d + D / 2."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
