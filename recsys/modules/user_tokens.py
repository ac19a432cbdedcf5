"""Makes contextual tokens from the features of a user and a request; they precede the history."""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.features import Column
from recsys.modules.mlp import build_mlp


class FeatureTokens(nn.Module):
    """Makes one token from each feature, by a separate linear layer.

    Args:
        columns: the columns of the USER features, at least one.
        embedding_dim: E.
    """

    def __init__(self, columns: list[Column], *, embedding_dim: int):
        super().__init__()
        self.names = [column.name for column in columns]
        # The suffix keeps a feature called `type` from colliding with attributes of a module.
        self.project = nn.ModuleDict(
            {f"{column.name}_token": nn.Linear(column.width, embedding_dim) for column in columns}
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Maps column -> [B, width] to [B * number of features, E], in the order of rows."""
        tokens = []
        for name, project in zip(self.names, self.project.values(), strict=True):
            tokens.append(project(inputs[name]).to(inputs[name].dtype))
        return torch.stack(tokens, dim=1).flatten(0, 1)


class JoinedTokens(nn.Module):
    """Makes several tokens from all features together, by one MLP.

    Args:
        config: the MLP and the number K of tokens.
        columns: the columns of the USER features.
        embedding_dim: E.

    Raises:
        ValueError: there is no feature.
    """

    def __init__(self, config: pb.JoinedContextualTokens, columns: list[Column], *, embedding_dim: int):
        super().__init__()
        if not columns:
            raise ValueError("joined_contextual: no feature has the side USER, so there is nothing to join")
        self.names = [column.name for column in columns]
        self.embedding_dim = embedding_dim
        width = sum(column.width for column in columns)
        self.project = build_mlp(config.mlp, width, config.num_tokens * embedding_dim)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Maps column -> [B, width] to [B * K, E], in the order of rows."""
        joined = torch.cat([inputs[name] for name in self.names], dim=1)
        return self.project(joined).to(joined.dtype).view(-1, self.embedding_dim)
