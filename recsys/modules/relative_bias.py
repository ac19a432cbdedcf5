"""`RelativeBiasTables`: the learned bias of attention scores by distance and time."""

import torch
from torch import nn

from recsys.modules.sequence import JaggedSequence
from recsys.ops import RelativeBias


class RelativeBiasTables(nn.Module):
    """The learned tables of `recsys.ops.RelativeBias` for one layer.

    Args:
        num_positions: P, rows of the position table.
        num_time_buckets: K, rows of the time table; 0 for a bias without time.
        num_heads: number of heads, each with its own tables; None shares the tables among heads.
    """

    def __init__(self, num_positions: int, num_time_buckets: int, num_heads: int | None = None):
        super().__init__()
        rows = () if num_heads is None else (num_heads,)
        self.position = nn.Parameter(torch.empty(*rows, num_positions))
        nn.init.normal_(self.position, std=0.02)
        if num_time_buckets:
            self.time = nn.Parameter(torch.empty(*rows, num_time_buckets))
            nn.init.normal_(self.time, std=0.02)
        else:
            self.register_buffer("time", torch.zeros(*rows, 1), persistent=False)

    def forward(self, sequence: JaggedSequence) -> RelativeBias:
        """Returns the bias of a batch: the tables with the batch's times."""
        return RelativeBias(self.position, self.time, sequence.timestamps, sequence.next_timestamps)
