"""`EmbeddingGroup`: looks up all embedding tables of a model together, as its first step.

TorchRec does the lookup, so that `training` can shard tables over ranks and overlap the exchange of ids with
the previous step. TorchRec's pipeline traces `EmbeddingGroup.look_up` down to the collections, so it only
calls modules and never reads values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torchrec import EmbeddingCollection, JaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.ops import segment_sum

LookedUp = Sequence[dict[str, JaggedTensor]]
"""For each collection of tables, column -> the vectors of its ids."""


class EmbeddingGroup(nn.Module):
    """Holds and looks up the embedding tables of a pipeline.

    Attributes:
        tables: an `EmbeddingCollection` for each width, since a collection has a single width; keys such as
            `dim_64`.
        pool: reduces the looked-up rows of multi-valued columns to one vector per row, event or candidate.
    """

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        start = partial(nn.init.normal_, mean=0.0, std=pipeline.model.embedding.init_std)
        by_width: dict[int, list[EmbeddingConfig]] = {}
        for table in features.tables(pipeline):
            config = EmbeddingConfig(
                # The suffix keeps a table called `type` from colliding with attributes of a module.
                name=f"{table.name}_table",
                num_embeddings=table.rows,
                embedding_dim=table.width,
                feature_names=list(table.columns),
                init_fn=start,
            )
            by_width.setdefault(table.width, []).append(config)
        self.tables = nn.ModuleDict(
            {f"dim_{width}": EmbeddingCollection(tables=configs) for width, configs in by_width.items()}
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


def vectors_of(looked_up: LookedUp) -> dict[str, Tensor]:
    """Returns column -> [ids, width], the vectors in all results of `EmbeddingGroup.look_up`."""
    return {name: jagged.values() for group in looked_up for name, jagged in group.items()}


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
