"""`ItemEncoder`: the item tower of a retriever, which computes the vectors that queries are compared with.

History tokens come from the preprocessor and do not use it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.modules.flops import linear_flops
from recsys.modules.mlp import build_mlp


class ItemEncoder(nn.Module):
    """Concatenates an item's id embedding and its features in the config's order and maps them to width E.

    Args:
        config: the inputs and layers.
        pipeline: the resolved config, of which features of side ITEM are used.

    Raises:
        ValueError: there is nothing to encode, or the id embedding is to be added to the result but is not E
            wide.
    """

    def __init__(self, config: pb.ItemEncoder, *, pipeline: pb.Pipeline):
        super().__init__()
        width = pipeline.model.embedding_dim
        columns = features.columns(pipeline, pb.ITEM)
        id_width = features.searched_item(pipeline).id.embedding_dim
        self.names = [column.name for column in columns]
        self.residual = config.residual
        self.joins_id_embedding = config.own_embedding and not config.residual
        total = sum(column.width for column in columns) + id_width * self.joins_id_embedding
        if not total:
            raise ValueError("item_encoder: no feature has the side ITEM, and own_embedding is not an input")
        if config.residual and (id_width != width or not config.own_embedding):
            raise ValueError(
                f"item_encoder.residual adds to the item's id embedding, which must have width {width}; "
                f"own_embedding is {str(config.own_embedding).lower()}, and the width is {id_width}"
            )
        self.layers = build_mlp(config.mlp, total, width)
        if config.residual:
            # Before training, an item's vector is its id embedding.
            nn.init.zeros_(self.layers[-1].weight)
            nn.init.zeros_(self.layers[-1].bias)

    def forward(self, embedding: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the vectors of n items, [n, E].

        Args:
            embedding: [n, width], the items' id embeddings.
            values: column of side ITEM -> [n, width]; numbers are [n, 1].
        """
        parts = [embedding] if self.joins_id_embedding else []
        vectors = self.layers(torch.cat([*parts, *(values[name] for name in self.names)], dim=1))
        return embedding + vectors if self.residual else vectors

    def flops(self, items: int) -> int:
        """Counts the FLOP for `items` items; see `recsys.modules.flops`."""
        return linear_flops(self.layers, items)
