"""Copies rows of a checkpoint's tensors to other rows of this rank's tensors, as a warm start needs it.

torch.distributed.checkpoint loads a tensor only as it was saved. Here, each stored shard is read once, so a
rank holds no more than one shard of the earlier table besides its own tensors.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from recsys.data.schema.carry_over import NONE
from recsys.training.distributed import gather
from recsys.training.host_copies import placed_parts
from recsys.training.restricted_unpickler import read_chunks


class _Part(NamedTuple):
    """A tensor on this rank: a whole one, or a shard.

    Attributes:
        tensor: [n, ...].
        offsets: place of its first element in the whole tensor.
        sources: int64 [n], the stored row that each of its rows takes, or `NONE`.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    sources: np.ndarray


def copy_rows(
    path: Path, stored: str, tensor: Tensor | ShardedTensor, sources: Callable[[np.ndarray], np.ndarray]
) -> int:
    """Copies rows of a stored tensor in place. Collective if `tensor` is sharded.

    Args:
        path: the folder of the state.
        stored: name of the tensor in the state.
        tensor: [rows, ...] with the same sizes as the stored tensor, except for the number of rows.
        sources: takes int64 rows of `tensor` and returns for each one the stored row, or `NONE`.

    Returns:
        The number of rows, over all ranks, that were copied.
    """
    parts = [
        _Part(part, offsets, sources(np.arange(offsets[0], offsets[0] + len(part))))
        for part, offsets in placed_parts(tensor)
    ]
    for offsets, chunk in read_chunks(path, stored):
        for part in parts:
            _copy(part, chunk, offsets)
    # Shards of columns hold the same rows; those of the first columns are counted.
    counted = sum(int((part.sources != NONE).sum()) for part in parts if not any(part.offsets[1:]))
    return sum(gather(counted)) if isinstance(tensor, ShardedTensor) else counted


def _copy(part: _Part, chunk: Tensor, offsets: tuple[int, ...]) -> None:
    """Copies what a part takes from one stored chunk, whose first element is at `offsets`."""
    there = part.sources - offsets[0]
    rows = np.flatnonzero((part.sources != NONE) & (there >= 0) & (there < len(chunk)))
    target, source = part.tensor, chunk
    for dim in range(1, part.tensor.dim()):
        begin = max(part.offsets[dim], offsets[dim])
        length = min(part.offsets[dim] + target.size(dim), offsets[dim] + source.size(dim)) - begin
        if length <= 0:
            return
        target = target.narrow(dim, begin - part.offsets[dim], length)
        source = source.narrow(dim, begin - offsets[dim], length)
    taken = source[torch.from_numpy(there[rows])].to(target)
    target.index_copy_(0, torch.from_numpy(rows).to(target.device), taken)
