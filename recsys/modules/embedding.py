"""`EmbeddingGroup`: looks up all embedding tables of a model together, as its first step.

TorchRec does the lookup, so that `training` can shard tables over ranks and overlap the exchange of ids with
the previous step. TorchRec's pipeline traces a model's forward pass down to the collections, so
`EmbeddingGroup.forward` only calls modules and never reads values.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torchrec import EmbeddingCollection, JaggedTensor
from torchrec.modules.embedding_configs import EmbeddingConfig

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.ops import segment_sum


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

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Returns column -> float32 [n, width]; n counts rows, events, candidates or shared items."""
        looked_up = [tables(batch.ids) for tables in self.tables.values()]
        return self.pool(looked_up, batch.value_counts)


class PoolValues(nn.Module):
    """Sums or averages the vectors of multi-valued columns; other columns stay unchanged."""

    def __init__(self, pipeline: pb.Pipeline):
        super().__init__()
        self.poolings = {
            column.name: column.feature.id.pooling
            for column in [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
            if column.multi_valued
        }

    def forward(
        self, looked_up: Sequence[dict[str, JaggedTensor]], value_counts: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns column -> [n, width].

        Args:
            looked_up: the result of each collection.
            value_counts: for each multi-valued column, the number of values of each row, event or candidate,
                int64 [n].
        """
        vectors = {name: jagged.values() for group in looked_up for name, jagged in group.items()}
        for name, pooling in self.poolings.items():
            counts = value_counts[name]
            pooled = segment_sum(vectors[name], counts)
            vectors[name] = pooled / counts.clamp(min=1)[:, None] if pooling == pb.MEAN else pooled
        return vectors
