"""`ItemEncoder`: the item tower, from what is known of an item to the vector that queries are compared with.

Part of a retriever; the history's tokens are made by its preprocessor, without it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.modules.flops import linear_flops
from recsys.modules.mlp import build_mlp


class ItemEncoder(nn.Module):
    """The item's own embedding and its features, concatenated in the config's order, through layers to E.

    Args:
        config: what goes in, and the layers.
        pipeline: resolved; its features of side ITEM.

    Raises:
        ValueError: there is nothing to encode, or the own embedding that is to be added has another width.
    """

    def __init__(self, config: pb.ItemEncoder, *, pipeline: pb.Pipeline):
        super().__init__()
        width = pipeline.model.embedding_dim
        columns = features.columns(pipeline, pb.ITEM)
        own = features.searched_item(pipeline).id.embedding_dim
        self.names = [column.name for column in columns]
        self.residual = config.residual
        self.joins_own = config.own_embedding and not config.residual
        total = sum(column.width for column in columns) + own * self.joins_own
        if not total:
            raise ValueError("item_encoder: no feature has the side ITEM, and own_embedding is not an input")
        if config.residual and (own != width or not config.own_embedding):
            raise ValueError(
                f"item_encoder.residual: an own embedding of width {width} is needed to add to; "
                f"own_embedding is {str(config.own_embedding).lower()}, its width {own}"
            )
        self.layers = build_mlp(config.mlp, total, width)
        if config.residual:
            # At first an item is its own embedding.
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)

    def forward(self, own: Tensor, known: Mapping[str, Tensor]) -> Tensor:
        """[n, E], vectors of n items.

        Args:
            own: [n, width], their own embeddings.
            known: column of side ITEM -> [n, width], numbers as [n, 1].
        """
        parts = [own] if self.joins_own else []
        vectors = self.layers(torch.cat([*parts, *(known[name] for name in self.names)], dim=1))
        return own + vectors if self.residual else vectors

    def flops(self, items: int) -> int:
        """FLOP for n items; see `recsys.modules.flops`."""
        return linear_flops(self.layers, items)
