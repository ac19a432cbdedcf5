"""Stores the vectors of a package's items with their original ids, and prepares new items for the item tower.

The file is parquet, so that other systems can read it.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.arrow import one_array
from recsys.data.batch import Batch
from recsys.data.convert.item_catalogue import convert, item_ids
from recsys.data.schema.row_layout import ShardedRowLayout, sharded_name
from recsys.data.schema.vocabulary import mappings
from recsys.models.base import Model

FILE = "item_embeddings.parquet"


def write_vectors(folder: Path, ids: pa.Array, vectors: Tensor) -> None:
    """Writes the file with the columns `id`, unchanged, and `vector`, a list of E float32.

    Args:
        folder: folder of the package.
        ids: [V], int64 or string.
        vectors: float32 [V, E] on the host.
    """
    table = vector_table({"id": ids}, vectors.contiguous().numpy())
    # The bytes of vectors look random, so compression would cost time and save nothing.
    pq.write_table(table, folder / FILE, compression="none", use_dictionary=["id"])


def vector_table(columns: Mapping[str, pa.Array], vectors: np.ndarray) -> pa.Table:
    """Makes a table of the given columns and `vector`, a list of E float32.

    Args:
        columns: the other columns by name, [n] each.
        vectors: float32 [n, E].
    """
    values = pa.array(vectors.reshape(-1))
    return pa.table({**columns, "vector": pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])})


def read_vectors(folder: Path) -> Tensor:
    """Reads the vectors, float32 [V, E], in the order of the file."""
    column = one_array(pq.read_table(folder / FILE, columns=["vector"])["vector"])
    values = column.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(values, np.float32).reshape(len(column), column.type.list_size))


def catalogue(model: Model, batch: Batch, pipeline: pb.Pipeline) -> Tensor:
    """Computes the vector of each item in the order of the vocabulary, float32 [V, E] on the host.

    Args:
        model: a model that searches items, in evaluation mode.
        batch: any batch that was read for evaluation.
        pipeline: the resolved config.
    """
    with torch.no_grad():
        rows = model.item_vectors(batch).float().cpu()
    order = ShardedRowLayout(len(rows), sharded_name(pipeline, features.searched_item(pipeline).id.table))
    return rows[torch.from_numpy(order.row_of(np.arange(len(rows))) - 1)]


def new_items(pipeline: pb.Pipeline, table: pa.Table) -> tuple[Tensor, ...]:
    """Converts a table of items to inputs of the item tower, in the order of `item_tower.item_signature`.

    Args:
        pipeline: the resolved config.
        table: one row per item, with its id and its features of side ITEM under their names.

    Raises:
        DataError: a column is missing, or holds invalid values.
    """
    item, vocabularies = features.searched_item(pipeline), mappings(pipeline)
    described = convert(pipeline, table, vocabularies, "items")
    inputs = [vocabularies[item.id.table].map(item_ids(table, item))]
    for column in features.columns(pipeline, pb.ITEM):
        flat = described[column.name]
        inputs.append(flat.values)
        if flat.offsets is not None:
            inputs.append(np.diff(flat.offsets))
    return tuple(torch.from_numpy(np.ascontiguousarray(column)) for column in inputs)
