"""`ContentEncoder`: what an item is, from its embeddings and numbers, the same for events and candidates."""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.modules.flops import linear_flops
from recsys.modules.gated_mlp import ContextualizedMLP, RowContext
from recsys.modules.mlp import MLP, build_mlp
from recsys.modules.precision import product_dtype


class ContentEncoder(nn.Module):
    """Concatenates an item's features in the config's order and brings them to E.

    Events and candidates share the parameters, so that an item means the same on both sides. A feature that
    one side does not have is replaced there by a learned vector.

    Args:
        config: how they are brought to E: one of `content_encoder`.
        pipeline: resolved; its features of side HISTORY or CANDIDATE make up an item.

    Raises:
        ValueError: no feature has one of these sides, or their width does not fit the choice.
    """

    def __init__(self, config: pb.ContextualPreprocessor, *, pipeline: pb.Pipeline):
        super().__init__()
        self.slots: dict[int, list[str]] = {pb.HISTORY: [], pb.CANDIDATE: []}
        self.missing = nn.ParameterDict()
        found = features.item_columns(pipeline)
        for column in found:
            for side, names in self.slots.items():
                names.append(features.PREFIX[side] + column.feature.name)
                if side not in column.feature.sides:
                    self.missing[names[-1]] = nn.Parameter(torch.zeros(column.width))
        if not found:
            raise ValueError(
                "no feature has the side HISTORY or CANDIDATE: an item without features has no content"
            )
        self.project = _projection(config, sum(column.width for column in found), pipeline)

    def forward(
        self, side: int, inputs: dict[str, Tensor], count: int, rows: RowContext | None = None
    ) -> Tensor:
        """Content of all events (`pb.HISTORY`) or candidates (`pb.CANDIDATE`).

        Args:
            side: whose.
            inputs: column -> [count, width], numbers as [count, 1].
            count: events or candidates of the batch.
            rows: whose they are, for `content_contextualized`; others do not look at it.

        Returns:
            [count, E], in the type of the last matrix product, if there is one.
        """
        parts = [
            self.missing[name].expand(count, -1) if name in self.missing else inputs[name]
            for name in self.slots[side]
        ]
        if isinstance(self.project, MLP):  # rounded as its first product would, before they are joined
            parts = [part.to(product_dtype(part)) for part in parts]
        joined = torch.cat(parts, dim=1)
        contextualized = isinstance(self.project, ContextualizedMLP)
        return self.project(joined, rows) if contextualized else self.project(joined)

    def flops(self, items: int, rows: int) -> int:
        """FLOP for n items of B rows; see `recsys.modules.flops`."""
        if isinstance(self.project, ContextualizedMLP):
            return self.project.flops(items, rows)
        return linear_flops(self.project, items)


class Slice(nn.Module):
    """[n, in_dim] -> [n, out_dim], the first columns.

    Raises:
        ValueError: there are fewer.
    """

    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        if in_dim < out_dim:
            raise ValueError(
                f"content_slice: an item's features are {in_dim} wide, model.embedding_dim is {out_dim}; "
                "use content_pad, or content"
            )
        self.out_dim = out_dim

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_dim] -> [n, out_dim]."""
        return x[:, : self.out_dim]

    def extra_repr(self) -> str:
        return f"{self.out_dim}"


class Pad(nn.Module):
    """[n, in_dim] -> [n, out_dim]: a learned vector, the same for all, stands behind the columns.

    Raises:
        ValueError: there are too many columns.
    """

    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        if in_dim > out_dim:
            raise ValueError(
                f"content_pad: an item's features are {in_dim} wide, model.embedding_dim is {out_dim}; "
                "use content_slice, or content"
            )
        self.filling = nn.Parameter(torch.zeros(out_dim - in_dim)) if in_dim < out_dim else None

    def forward(self, x: Tensor) -> Tensor:
        """[n, in_dim] -> [n, out_dim]."""
        if self.filling is None:
            return x
        return torch.cat([x, self.filling.to(x.dtype).expand(x.shape[0], -1)], dim=1)


def _projection(config: pb.ContextualPreprocessor, in_dim: int, pipeline: pb.Pipeline) -> nn.Module:
    width = pipeline.model.embedding_dim
    chosen = config.WhichOneof("content_encoder")
    if chosen == "content_slice":
        return Slice(in_dim, width)
    if chosen == "content_pad":
        return Pad(in_dim, width)
    if chosen == "content_contextualized":
        context_dim = sum(column.width for column in features.columns(pipeline, pb.USER))
        return ContextualizedMLP(
            config.content_contextualized, in_dim=in_dim, context_dim=context_dim, out_dim=width
        )
    return build_mlp(config.content, in_dim, width)
