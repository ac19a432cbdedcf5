"""Looks up sharded tables in a run of one process, where every table is whole and nothing is exchanged.

TorchRec's sharded collections send ids to the ranks of their rows even if there is only one rank: 4 ms a step
on a GPU (experiments/2026-11-28-recorded-steps). `LocalLookUp` calls FBGEMM's kernels in such a collection
without this exchange. Weights, fused optimizers and the names in checkpoints stay those of the collection.
"""

import logging

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from recsys.modules.embedding import EmbeddingGroup

log = logging.getLogger(__name__)


class LocalLookUp:
    """Looks up the rows of a sharded collection whose tables are whole on this rank.

    Args:
        tables: the collection of a run of one process.

    Attributes:
        columns: the columns that read the tables. Ids with keys in this order need not be rearranged.
    """

    def __init__(self, tables: ShardedEmbeddingCollection) -> None:
        self._kernels = [(kernel, kernel.config.feature_names()) for kernel in kernels_of(tables)]
        self.columns = [name for _, names in self._kernels for name in names]
        # Kept on the device, since a copy to it would wait.
        self._orders: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns column -> the vectors of its ids; their gradients train the tables in the backward pass."""
        looked_up = {}
        for kernel, names in self._kernels:
            features = self._select(ids, names)
            rows = kernel(features).split(features.length_per_key())
            lengths = features.lengths().view(len(rows), -1)
            columns = zip(features.keys(), rows, lengths, strict=True)
            looked_up |= {name: JaggedTensor(values, lengths=counts) for name, values, counts in columns}
        return looked_up

    def rows(self, ids: KeyedJaggedTensor) -> Tensor:
        """Returns the vectors of all columns, one after the other, [ids, width]."""
        rows = [kernel(self._select(ids, names)) for kernel, names in self._kernels]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _select(self, ids: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
        """Returns the ids of some columns, in the order of the names."""
        keys = ids.keys()
        if keys == names:
            return ids
        first = keys.index(names[0])
        if keys[first : first + len(names)] == names:
            segments = [size for size in (first, len(names), len(keys) - first - len(names)) if size]
            return ids.split(segments)[1 if first else 0]
        order = [keys.index(name) for name in names]
        if (places := self._orders.get(tuple(order))) is None:
            places = self._orders[tuple(order)] = torch.tensor(order, dtype=torch.int32, device=ids.device())
        return ids.permute(order, places)


def kernels_of(tables: ShardedEmbeddingCollection) -> list[BaseBatchedEmbedding]:
    """Returns the parts of a collection that hold this rank's rows, each an FBGEMM module for some tables."""
    return [kernel for part in tables._lookups for kernel in part._emb_modules]


def look_up_locally(module: nn.Module) -> None:
    """Lets the embedding groups in a module, which is sharded over one process, look up without exchange."""
    for group in module.modules():
        if isinstance(group, EmbeddingGroup):
            look_ups = {
                key: LocalLookUp(tables)
                for key, tables in group.tables.items()
                if isinstance(tables, ShardedEmbeddingCollection)
            }
            group.local = {key: look_up for key, look_up in look_ups.items() if _is_whole(look_up)}


def _is_whole(look_up: LocalLookUp) -> bool:
    """Returns whether no table is divided; logs it if one is."""
    if len(look_up.columns) == len(set(look_up.columns)):
        return True
    log.info("a table is divided by columns, so TorchRec exchanges ids and vectors within this process")
    return False
