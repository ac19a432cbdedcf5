"""`ActionEncoder`: encodes what a user did with an item, from a bitmask and the seconds watched."""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.flops import linear_flops
from recsys.modules.gated_mlp import ContextualizedMLP, RowContext
from recsys.modules.mlp import build_mlp


class ActionEncoder(nn.Module):
    """Encodes events by a learned vector for each bit that is set and each threshold that is reached.

    The vectors are summed, or concatenated and passed through layers.

    Args:
        config: the bits, thresholds in seconds, and layers.
        embedding_dim: E.
        context_dim: width of the concatenated USER features, for layers whose weights depend on them.

    Raises:
        ValueError: layers without a bit or threshold, or without the USER features that they need.
    """

    def __init__(self, config: pb.ActionEncoder, *, embedding_dim: int, context_dim: int = 0):
        super().__init__()
        bits = torch.tensor([bit.bit for bit in config.bits], dtype=torch.int64)
        thresholds = torch.tensor(list(config.watch_time_thresholds), dtype=torch.float32)
        self.register_buffer("bits", bits, persistent=False)
        self.register_buffer("thresholds", thresholds, persistent=False)
        count, layers = len(bits) + len(thresholds), config.concatenated
        joined = config.HasField("concatenated")
        width = layers.dim if joined else embedding_dim
        self.weight = nn.Parameter(torch.empty(count, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.project = None
        if joined and count == 0:
            raise ValueError("action.concatenated: there is neither a bit nor a threshold to concatenate")
        if layers.HasField("contextualized"):
            self.project = ContextualizedMLP(
                layers.contextualized, in_dim=count * width, context_dim=context_dim, out_dim=embedding_dim
            )
        elif joined:
            self.project = build_mlp(layers.mlp, count * width, embedding_dim)

    def forward(self, actions: Tensor, watch_time: Tensor, rows: RowContext | None = None) -> Tensor:
        """Encodes n events.

        Args:
            actions: int64 [n], bitmask.
            watch_time: float32 [n], seconds.
            rows: the rows that the events belong to; only `contextualized` layers read it.

        Returns:
            [n, E], in the dtype of matrix products.
        """
        done = ((actions[:, None] >> self.bits) & 1).bool()
        watched = watch_time[:, None] >= self.thresholds
        present = torch.cat([done, watched], dim=1).to(self.weight.dtype)
        if self.project is None:
            return present @ self.weight
        vectors = (present[:, :, None] * self.weight).flatten(1)
        contextualized = isinstance(self.project, ContextualizedMLP)
        return self.project(vectors, rows) if contextualized else self.project(vectors)

    def flops(self, events: int, rows: int) -> int:
        """Counts the FLOP for `events` events of `rows` rows; see `recsys.modules.flops`."""
        if isinstance(self.project, ContextualizedMLP):
            return self.project.flops(events, rows)
        return 0 if self.project is None else linear_flops(self.project, events)
