"""`ContentEncoder`: encodes an item, in an event or as a candidate, from its embeddings and numbers."""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import features
from recsys.modules.flops import linear_flops
from recsys.modules.gated_mlp import ContextualizedMLP, RowContext
from recsys.modules.mlp import MLP, build_mlp
from recsys.modules.precision import product_dtype


class ContentEncoder(nn.Module):
    """Concatenates an item's features in the config's order and maps them to width E.

    Events and candidates share the parameters, so that an item has the same vector on both sides. Where a
    side lacks a feature, a learned vector replaces it.

    Args:
        config: the mapping to width E, chosen in `content_encoder`.
        pipeline: the resolved config; its features of side HISTORY or CANDIDATE describe an item.

    Raises:
        ValueError: no feature has one of these sides, or their width does not fit the mapping.
    """

    def __init__(self, config: pb.ContextualPreprocessor, *, pipeline: pb.Pipeline):
        super().__init__()
        self.slots: dict[int, list[str]] = {pb.HISTORY: [], pb.CANDIDATE: []}
        self.missing = nn.ParameterDict()
        columns = features.item_columns(pipeline)
        for column in columns:
            for side, names in self.slots.items():
                names.append(features.PREFIX[side] + column.feature.name)
                if side not in column.feature.sides:
                    self.missing[names[-1]] = nn.Parameter(torch.zeros(column.width))
        if not columns:
            raise ValueError(
                "no feature has the side HISTORY or CANDIDATE: an item without features has no content"
            )
        self.project = _projection(config, sum(column.width for column in columns), pipeline)

    def forward(
        self, side: int, inputs: dict[str, Tensor], count: int, rows: RowContext | None = None
    ) -> Tensor:
        """Encodes all events (`pb.HISTORY`) or candidates (`pb.CANDIDATE`) of a batch.

        Args:
            side: `pb.HISTORY` or `pb.CANDIDATE`.
            inputs: column -> [count, width], numbers as [count, 1].
            count: number of events or candidates.
            rows: the rows that the events or candidates belong to; only `content_contextualized` reads it.

        Returns:
            [count, E], in the dtype of the last matrix product, if there is any.
        """
        parts = [
            self.missing[name].expand(count, -1) if name in self.missing else inputs[name]
            for name in self.slots[side]
        ]
        if isinstance(self.project, MLP):  # cast like the first product, but before cat copies
            parts = [part.to(product_dtype(part)) for part in parts]
        joined = torch.cat(parts, dim=1)
        contextualized = isinstance(self.project, ContextualizedMLP)
        return self.project(joined, rows) if contextualized else self.project(joined)

    def flops(self, items: int, rows: int) -> int:
        """Counts the FLOP for `items` items of `rows` rows; see `recsys.modules.flops`."""
        if isinstance(self.project, ContextualizedMLP):
            return self.project.flops(items, rows)
        return linear_flops(self.project, items)


class Slice(nn.Module):
    """Keeps the first `out_dim` columns: [n, in_dim] -> [n, out_dim].

    Raises:
        ValueError: there are fewer than `out_dim` columns.
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
        """Maps [n, in_dim] to [n, out_dim]."""
        return x[:, : self.out_dim]

    def extra_repr(self) -> str:
        return f"{self.out_dim}"


class Pad(nn.Module):
    """Appends a learned vector, the same for all items, to the columns: [n, in_dim] -> [n, out_dim].

    Raises:
        ValueError: there are more than `out_dim` columns.
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
        """Maps [n, in_dim] to [n, out_dim]."""
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
