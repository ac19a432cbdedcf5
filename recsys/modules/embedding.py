"""`EmbeddingGroup`: looks up all embedding tables of a model together, as its first step.

TorchRec does the lookup, so that `training` can shard tables over ranks and overlap the exchange of ids with
the previous step. TorchRec's pipeline traces `EmbeddingGroup.look_up` down to the collections, so it only
calls modules and never reads values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, JaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.types import DataType

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.modules import table_values
from recsys.modules.losses.base import widen
from recsys.modules.table_values import BlockNormal
from recsys.ops import segment_sum

SUFFIX = "_table"
"""Suffix of a table's name in its collection. It keeps a table called `type` from colliding with attributes
of a module."""

LARGE = "_large"
"""Suffix of the key of a collection whose tables are built on the meta device."""
_WEIGHT = re.compile(r"(?:.*\.)?tables\.dim_[0-9]+\w*\.embeddings\.(.+)_table\.weight")


def table_of(name: str) -> str | None:
    """Returns the embedding table that a model's parameter holds, by the parameter's name; None if it holds
    none."""
    match = _WEIGHT.fullmatch(name)
    return match[1] if match else None


LookedUp = Sequence[dict[str, JaggedTensor]]
"""For each collection of tables, column -> the vectors of its ids."""


class EmbeddingGroup(nn.Module):
    """Holds and looks up the embedding tables of a pipeline.

    Sharded tables of more than `table_values.DRAWN_WHOLE` numbers are on the meta device, without memory,
    until `materialize` allocates them, or `training`, which allocates on each rank its own part.

    Attributes:
        tables: an `EmbeddingCollection` for each width, since a collection has a single width; keys such as
            `dim_64`. Large tables, and tables whose placement is not `model.embedding.placement`, have
            collections of their own.
        pool: reduces the looked-up rows of multi-valued columns to one vector per row, event or candidate.
    """

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        usual, std = pipeline.model.embedding.placement, pipeline.model.embedding.init_std
        drawn_whole = partial(nn.init.normal_, mean=0.0, std=std)
        groups: dict[str, list[EmbeddingConfig]] = {}
        for table in features.tables(pipeline):
            key = f"dim_{table.width}"
            if table.sharded != (usual == pb.Embedding.SHARDED):
                key += "_sharded" if table.sharded else "_replicated"
            start = drawn_whole
            if table.sharded and table.rows * table.width > table_values.DRAWN_WHOLE:
                key += LARGE
                start = BlockNormal(table.name, table.width, std, torch.initial_seed())
            config = EmbeddingConfig(
                name=table.name + SUFFIX,
                num_embeddings=table.rows,
                embedding_dim=table.width,
                data_type=DataType.FP16 if table.precision == pb.FP16 else DataType.FP32,
                feature_names=list(table.columns),
                init_fn=start,
            )
            groups.setdefault(key, []).append(config)
        self.tables = nn.ModuleDict(
            {
                key: EmbeddingCollection(
                    tables=configs, device=torch.device("meta") if key.endswith(LARGE) else None
                )
                for key, configs in groups.items()
            }
        )
        self.pool = PoolValues(pipeline)
        self._given: Mapping[str, Tensor] | None = None

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns column -> float32 [n, width]; n counts rows, events, candidates or shared items."""
        if self._given is not None:
            return self.pool.pooled(self._given, batch.value_counts)
        return self.pool(self.look_up(batch), batch.value_counts)

    def look_up(self, batch: Batch) -> LookedUp:
        """Returns the rows of all tables that a batch names, for each collection of tables."""
        return [tables(batch.ids) for tables in self.tables.values()]

    @contextmanager
    def given(self, vectors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block `forward` takes these looked-up vectors, column -> [ids, width]."""
        self._given = vectors
        try:
            yield
        finally:
            self._given = None

    def materialize(self) -> None:
        """Allocates whole tables on the CPU for those on the meta device, with their initial values."""
        for key, tables in self.tables.items():
            if key.endswith(LARGE) and isinstance(tables, EmbeddingCollection):
                tables.to_empty(device="cpu")
                for config in tables.embedding_configs():
                    if config.init_fn is not None:
                        config.init_fn(tables.embeddings[config.name].weight)


def vectors_of(looked_up: LookedUp) -> dict[str, Tensor]:
    """Returns column -> [ids, width], the vectors in all results of `EmbeddingGroup.look_up`."""
    return {name: widen(jagged.values()) for group in looked_up for name, jagged in group.items()}


class PoolValues(nn.Module):
    """Sums or averages the vectors of multi-valued columns; other columns stay unchanged."""

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        self.poolings = {
            column.name: column.feature.id.pooling
            for column in [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
            if column.multi_valued
        }

    def forward(self, looked_up: LookedUp, value_counts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns column -> [n, width], given the result of `EmbeddingGroup.look_up`."""
        return self.pooled(vectors_of(looked_up), value_counts)

    def pooled(self, looked_up: Mapping[str, Tensor], value_counts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns column -> [n, width].

        Args:
            looked_up: column -> [ids, width].
            value_counts: for each multi-valued column, the number of values of each row, event or candidate,
                int64 [n].
        """
        vectors = dict(looked_up)
        for name, pooling in self.poolings.items():
            counts = value_counts[name]
            pooled = segment_sum(vectors[name], counts)
            vectors[name] = pooled / counts.clamp(min=1)[:, None] if pooling == pb.MEAN else pooled
        return vectors
