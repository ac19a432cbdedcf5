"""`ContentEncoder`: what an item is, from its embeddings and numbers, the same for events and candidates."""

import torch
from torch import Tensor, nn

from recsys import features
from recsys import protos as pb
from recsys.modules.mlp import MLP


class ContentEncoder(nn.Module):
    """Concatenates an item's features in the config's order and sends them through one MLP.

    Events and candidates share the MLP, so that an item means the same on both sides. A feature that one
    side does not have is replaced there by a learned vector.

    Args:
        config: hidden layers.
        pipeline: resolved; its features of side HISTORY or CANDIDATE make up an item.

    Raises:
        ValueError: no feature has one of these sides.
    """

    def __init__(self, config: pb.Mlp, *, pipeline: pb.Pipeline):
        super().__init__()
        self.slots: dict[int, list[str]] = {pb.HISTORY: [], pb.CANDIDATE: []}
        self.missing = nn.ParameterDict()
        width = 0
        for column in _first_column_of_each_item_feature(pipeline):
            for side, names in self.slots.items():
                names.append(features.PREFIX[side] + column.feature.name)
                if side not in column.feature.sides:
                    self.missing[names[-1]] = nn.Parameter(torch.zeros(column.width))
            width += column.width
        if width == 0:
            raise ValueError(
                "no feature has the side HISTORY or CANDIDATE: an item without features has no content"
            )
        self.mlp = MLP(
            width,
            list(config.hidden),
            pipeline.model.embedding_dim,
            layer_norm=config.layer_norm,
            dropout=config.dropout,
        )

    def forward(self, side: int, inputs: dict[str, Tensor], count: int) -> Tensor:
        """Content of all events (`pb.HISTORY`) or candidates (`pb.CANDIDATE`).

        Args:
            side: whose.
            inputs: column -> [count, width], numbers as [count, 1].
            count: events or candidates of the batch.

        Returns:
            [count, E].
        """
        parts = [
            self.missing[name].expand(count, -1) if name in self.missing else inputs[name]
            for name in self.slots[side]
        ]
        joined = torch.cat(parts, dim=1)
        # The sums that follow are float32 also where matrix products run in bfloat16.
        return self.mlp(joined).to(joined.dtype)


def _first_column_of_each_item_feature(pipeline: pb.Pipeline) -> list[features.Column]:
    found: dict[str, features.Column] = {}
    for column in features.columns(pipeline):
        if column.side != pb.USER:
            found.setdefault(column.feature.name, column)
    return list(found.values())
