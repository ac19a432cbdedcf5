"""`TimestampLayerNormPostprocessor`: adds hour and weekday to output tokens, then normalizes them."""

import math

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.norm import LayerNorm

DAY = 24 * 3600
WEEK = 7 * DAY
PERIODS = (DAY, WEEK)
"""Periods in seconds. Each becomes an angle that returns to its start after one period."""


@register(pb.TimestampLayerNormPostprocessor)
class TimestampLayerNormPostprocessor(nn.Module):
    """Computes LayerNorm(x + W f(t)), where f is [sin, cos] of the time of day and of the time of the week.

    An angle is 2 pi ((t + offset) modulo period) / period, with t in seconds since 1970; W is learned, E x 4.
    So 23:59 is close to 0:00, and Sunday night to Monday morning. The week begins on a Thursday, as 1970 did,
    but W can rotate its start.

    Args:
        config: eps, and the offset of local time.
        embedding_dim: E.
    """

    def __init__(self, config: pb.TimestampLayerNormPostprocessor, *, embedding_dim: int):
        super().__init__()
        self.offset = 60 * config.utc_offset_minutes
        self.project = nn.Linear(2 * len(PERIODS), embedding_dim, bias=False)
        self.norm = LayerNorm(embedding_dim, eps=config.eps)

    def forward(self, values: Tensor, timestamps: Tensor) -> Tensor:
        """Maps values [n, E] and timestamps int64 [n], in seconds, to [n, E] of the values' dtype."""
        wide = torch.promote_types(values.dtype, self.project.weight.dtype)
        shift = self.project(self.cyclic(timestamps).to(self.project.weight.dtype))
        return self.norm(values.to(wide) + shift.to(wide)).to(values.dtype)

    def cyclic(self, timestamps: Tensor) -> Tensor:
        """Maps int64 [n] in seconds to float32 [n, 4]: sine and cosine of the day, then of the week."""
        # Take the remainder of integers: in float32, adjacent values of current times are 128 s apart.
        local = timestamps + self.offset
        turns = torch.stack([(local % period).to(torch.float32) / period for period in PERIODS], dim=1)
        angles = 2 * math.pi * turns
        return torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1)
