"""Empties some columns of a batch."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch


def keep_columns(batch: Batch, kept: Collection[str]) -> Batch:
    """Returns a batch with the same rows and keys, in which all columns except `kept` are empty."""
    return replace(
        batch,
        ids=_ids(batch.ids, kept),
        value_counts=_only(batch.value_counts, kept),
        numbers=_only(batch.numbers, kept),
    )


def without_catalogue(batch: Batch, pipeline: pb.Pipeline) -> Batch:
    """Returns the batch without the items that its queries are compared with; its rows do not change."""
    return keep_columns(batch, {column.name for column in features.columns(pipeline)})


def _only(tensors: dict[str, Tensor], kept: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor if name in kept else tensor[:0] for name, tensor in tensors.items()}


def _ids(ids: KeyedJaggedTensor, kept: Collection[str]) -> KeyedJaggedTensor:
    keys, sizes, rows = ids.keys(), ids.length_per_key(), ids.stride()
    values, lengths = ids.values().split(sizes), ids.lengths().split([rows] * len(keys))
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([part if key in kept else part[:0] for key, part in zip(keys, values, strict=True)]),
        lengths=torch.cat(
            [part if key in kept else torch.zeros_like(part) for key, part in zip(keys, lengths, strict=True)]
        ),
        stride=rows,
        # Without this argument, torchrec would read it from the device.
        length_per_key=[size if key in kept else 0 for key, size in zip(keys, sizes, strict=True)],
    )
