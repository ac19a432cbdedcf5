"""Collects the most frequent items, their vectors and names for TensorBoard's embedding projector."""

import logging
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.schema.row_layout import ShardedRowLayout, sharded_name

MOST = 1000
"""Show this many items; the projector becomes slow with many more."""

NAMES = "names.parquet"
"""Optional file beside the vocabulary folder that gives items names: columns `id` and `name`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Items:
    """Items in order of falling frequency.

    Attributes:
        vectors: float [n, width] on the host.
        ids: the n original ids as text.
        names: n names; a name that is not known is empty.
    """

    vectors: Tensor
    ids: list[str]
    names: list[str]


def frequent_items(
    pipeline: pb.Pipeline, weights: Mapping[str, Tensor | ShardedTensor], limit: int = MOST
) -> Items | None:
    """Returns the first items of the vocabulary, which are the most frequent ones.

    If a table is sharded over ranks, only the items in this rank's shard are returned.

    Args:
        pipeline: the resolved config. The items are those that the model searches, or else those of the
            first id feature of candidates that has a vocabulary.
        weights: the model's weights by name.
        limit: the largest number of items.

    Returns:
        None if items have no vocabulary or no table, or if this rank holds none of their rows.
    """
    item = _item(pipeline)
    if item is None:
        return None
    names_of_table = [name for name in weights if name.endswith(f".{item.id.table}_table.weight")]
    if not names_of_table:
        return None
    (name,) = names_of_table
    count = item.id.vocabulary.size
    rows = ShardedRowLayout(count, sharded_name(pipeline, item.id.table)).row_of(np.arange(min(limit, count)))
    part = _part(weights[name])
    if part is None:
        return None
    places = np.flatnonzero((rows >= part.first) & (rows < part.first + len(part.rows)))
    if not len(places):
        return None
    listed = _first_ids(item.id.vocabulary.file, len(rows))
    ids = [listed[place] for place in places]
    vectors = part.rows[torch.from_numpy(rows[places] - part.first)]
    folder = posixpath.dirname(posixpath.dirname(item.id.vocabulary.file))
    names = _names(posixpath.join(folder, NAMES), ids)
    return Items(vectors.detach().cpu(), ids, [names.get(item_id, "") for item_id in ids])


def _item(pipeline: pb.Pipeline) -> pb.Feature | None:
    searched = model_of(pipeline).item_feature
    for column in features.columns(pipeline, pb.CANDIDATE):
        feature = column.feature
        if feature.id.HasField("vocabulary") and not column.multi_valued:
            if searched is None or feature.name == searched:
                return feature
    return None


class _Part(NamedTuple):
    """Consecutive rows of a table: the index of the first row, and the rows."""

    first: int
    rows: Tensor


def _part(weight: Tensor | ShardedTensor) -> _Part | None:
    """Returns this rank's rows of a table, or None if it has none."""
    if not isinstance(weight, ShardedTensor):
        return _Part(0, weight)
    parts = [_Part(shard.metadata.shard_offsets[0], shard.tensor) for shard in weight.local_shards()]
    return parts[0] if parts else None


def _first_ids(path: str, count: int) -> list[str]:
    ids: list[str] = []
    with fsspec.open(path, "rb") as file:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=max(count, 1), columns=["id"]):
            ids += map(str, batch["id"].to_pylist()[: count - len(ids)])
            if len(ids) == count:
                break
    return ids


def _names(path: str, ids: list[str]) -> dict[str, str]:
    """Reads names by id; empty if there is no usable file."""
    system, place = fsspec.url_to_fs(path)
    if not system.exists(place):
        return {}
    try:
        with system.open(place, "rb") as file:
            table = pq.read_table(file)
        texts = table["id"].cast(pa.string())
        wanted = table.filter(pc.is_in(texts, value_set=pa.array(ids, pa.string())))
        return {str(row["id"]): str(row["name"]) for row in wanted.select(["id", "name"]).to_pylist()}
    except (OSError, KeyError, pa.ArrowException) as error:
        log.warning(
            "%s: no names are taken from it (%s); it should have columns `id` and `name`", path, error
        )
        return {}
