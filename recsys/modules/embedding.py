"""`EmbeddingGroup`: makes vectors of all features of a batch, as the first step of a model: it looks up all
embedding tables together, joins the numbers, and applies the modules of kinds of features.

TorchRec does the lookup, so that `training` can shard tables over ranks and overlap the exchange of ids with
the previous step. TorchRec's pipeline traces `EmbeddingGroup.look_up` down to the collections, so it only
calls modules and never reads values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.types import DataType

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.modules import table_values
from recsys.modules.losses.base import widen
from recsys.modules.outside_tables import LookUp, OutsideTables
from recsys.modules.table_values import BlockNormal
from recsys.ops import segment_sum

SUFFIX = "_table"
"""Suffix of a table's name in its collection. It keeps a table called `type` from colliding with attributes
of a module."""

LARGE = "_large"
"""Suffix of the key of a collection whose tables are built on the meta device."""

OUTSIDE = "outside"
"""Key of the stand-in for tables that are not part of the model, see `EmbeddingGroup.move_outside`."""

_WEIGHT = re.compile(r"(?:.*\.)?tables\.dim_[0-9]+\w*\.embeddings\.(.+)_table\.weight")


def table_of(name: str) -> str | None:
    """Returns the embedding table that a model's parameter holds, by the parameter's name; None if it holds
    none."""
    match = _WEIGHT.fullmatch(name)
    return match[1] if match else None


LookedUp = Sequence[dict[str, JaggedTensor]]
"""For each collection of tables, column -> the vectors of its ids."""


class LocalTables(Protocol):
    """Looks up like an `EmbeddingCollection`.

    Attributes:
        columns: the columns that read the tables, in the order in which they are looked up fastest.
    """

    columns: list[str]

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns column -> the vectors of its ids."""
        ...

    def rows(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns the vectors of all columns, one after the other, [ids, width]."""
        ...


class EmbeddingGroup(nn.Module):
    """Holds and looks up the embedding tables of a pipeline.

    Sharded tables of more than `table_values.DRAWN_WHOLE` numbers are on the meta device, without memory,
    until `materialize` allocates them, or `training`, which allocates on each rank its own part.

    Attributes:
        tables: an `EmbeddingCollection` for each width, since a collection has a single width; keys such as
            `dim_64`. Large tables, and tables whose placement is not `model.embedding.placement`, have
            collections of their own. After `move_outside`, `outside` stands in for the removed tables.
        join: makes one vector per row, event or candidate of the looked-up rows and the numbers.
        local: by key of `tables`, what looks up in place of the collection. `training` sets it for
            sharded tables of a single process.
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
        self._widths = {
            key: {name: config.embedding_dim for config in configs for name in config.feature_names}
            for key, configs in groups.items()
        }
        self.join = FeatureVectors(pipeline)
        self.local: Mapping[str, LocalTables] = {}
        self._given: Mapping[str, Tensor] | None = None

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns column -> float32 [n, width]; n counts rows, events, candidates or shared items."""
        if self._given is not None:
            return self.join.joined(self._given, batch.value_counts, batch.numbers)
        return self.join(self.look_up(batch.ids), batch.value_counts, batch.numbers)

    def look_up(self, ids: KeyedJaggedTensor) -> LookedUp:
        """Returns the rows of all tables that a batch's ids name, for each collection of tables."""
        return [self.local.get(key, tables)(ids) for key, tables in self.tables.items()]

    def groups(self) -> list[dict[str, int]]:
        """Returns for each collection of tables column -> width, in the order of `rows`."""
        columns = [
            self.local[key].columns if key in self.local else list(self._widths[key]) for key in self.tables
        ]
        return [
            {name: self._widths[key][name] for name in names}
            for key, names in zip(self.tables, columns, strict=True)
        ]

    def rows(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Returns for each collection of tables the vectors of all columns, one after the other, as float32
        [ids, width]."""
        vectors = []
        for key, tables in self.tables.items():
            if key in self.local:
                vectors.append(widen(self.local[key].rows(ids)))
            else:
                looked_up = tables(ids)
                vectors.append(torch.cat([widen(looked_up[name].values()) for name in self._widths[key]]))
        return vectors

    @property
    def exchanges(self) -> bool:
        """Whether looking up sends ids to other processes, or to this one in the same way."""
        return any(
            isinstance(tables, ShardedModule) and key not in self.local for key, tables in self.tables.items()
        )

    @contextmanager
    def given(self, vectors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block `forward` takes these looked-up vectors, column -> [ids, width]."""
        self._given = vectors
        try:
            yield
        finally:
            self._given = None

    def move_outside(self, look_ups: Mapping[str, LookUp]) -> None:
        """Removes tables and their weights, and looks their rows up by functions from then on.

        Args:
            look_ups: by name of the table, the function that looks up its rows.
        """
        columns, widths = {}, {}
        for key, tables in list(self.tables.items()):
            kept = []
            for config in tables.embedding_configs():
                name = config.name.removesuffix(SUFFIX)
                if name in look_ups:
                    columns[name], widths[name] = config.feature_names, config.embedding_dim
                else:
                    kept.append(config)
            if not kept:
                del self.tables[key]
            elif len(kept) < len(tables.embedding_configs()):
                smaller = EmbeddingCollection(tables=kept, device=torch.device("meta"))
                for config in kept:
                    smaller.embeddings[config.name] = tables.embeddings[config.name]
                self.tables[key] = smaller
        if columns:
            self.tables[OUTSIDE] = OutsideTables(columns, widths, look_ups)

    @property
    def outside(self) -> OutsideTables | None:
        """The stand-in for the tables that `move_outside` removed; None if it removed none."""
        return self.tables[OUTSIDE] if OUTSIDE in self.tables else None

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


class FeatureVectors(nn.Module):
    """Makes the vectors of all columns: pools the rows of multi-valued columns, adds the numbers, and applies
    the modules of kinds of features.

    Attributes:
        encode: by feature, the module that its kind builds.
    """

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        columns = [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
        self.poolings = {column.name: column.kind.pooling for column in columns if column.multi_valued}
        modules = {kind.feature.name: kind.module() for kind in features.kinds(pipeline)}
        # The suffix keeps a feature called `type` from colliding with attributes of a module.
        self.encode = nn.ModuleDict(
            {f"{name}_feature": module for name, module in modules.items() if module is not None}
        )
        keys = {column.name: f"{column.feature.name}_feature" for column in columns}
        self._encoded = {name: key for name, key in keys.items() if key in self.encode}

    def forward(
        self, looked_up: LookedUp, value_counts: dict[str, Tensor], numbers: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns column -> [n, width], given the result of `EmbeddingGroup.look_up`."""
        return self.joined(vectors_of(looked_up), value_counts, numbers)

    def joined(
        self, looked_up: Mapping[str, Tensor], value_counts: dict[str, Tensor], numbers: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns column -> [n, width].

        Args:
            looked_up: column -> [ids, width].
            value_counts: for each multi-valued column, the number of values of each row, event or candidate,
                int64 [n].
            numbers: column -> [n], or [n, numbers].
        """
        vectors = dict(looked_up)
        for name, pooling in self.poolings.items():
            counts = value_counts[name]
            pooled = segment_sum(vectors[name], counts)
            vectors[name] = pooled / counts.clamp(min=1)[:, None] if pooling == pb.MEAN else pooled
        for name, values in numbers.items():
            vectors[name] = values if values.dim() > 1 else values[:, None]
        for name, key in self._encoded.items():
            vectors[name] = self.encode[key](vectors[name])
        return vectors
