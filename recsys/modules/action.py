"""`ActionEncoder`: what a user did with an item, from a bitmask and the seconds watched."""

import torch
from torch import Tensor, nn

from recsys import protos as pb


class ActionEncoder(nn.Module):
    """The sum of one learned vector for each bit that is set and each threshold that is reached.

    Args:
        config: bits and thresholds.
        embedding_dim: E.
    """

    def __init__(self, config: pb.ActionEncoder, *, embedding_dim: int):
        super().__init__()
        bits = torch.tensor([bit.bit for bit in config.bits], dtype=torch.int64)
        thresholds = torch.tensor(list(config.watch_time_thresholds), dtype=torch.float32)
        self.register_buffer("bits", bits, persistent=False)
        self.register_buffer("thresholds", thresholds, persistent=False)
        self.weight = nn.Parameter(torch.empty(len(bits) + len(thresholds), embedding_dim))
        nn.init.normal_(self.weight, std=embedding_dim**-0.5)

    def forward(self, actions: Tensor, watch_time: Tensor) -> Tensor:
        """The vectors of n events.

        Args:
            actions: int64 [n], bitmask.
            watch_time: float32 [n], seconds.

        Returns:
            [n, E].
        """
        done = ((actions[:, None] >> self.bits) & 1).bool()
        watched = watch_time[:, None] >= self.thresholds
        present = torch.cat([done, watched], dim=1).to(self.weight.dtype)
        return (present @ self.weight).to(self.weight.dtype)
