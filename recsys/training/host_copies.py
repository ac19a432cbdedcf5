"""Copies a run's tensors to host memory, so that they can be written while training changes them.

torch's own stagers do not copy sharded tensors that are on the CPU already, or copy them twice.
"""

import copy
import math
import weakref
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard
from torchrec.distributed.types import ShardedTensor

from recsys.training.background import in_background

_CPU = torch.device("cpu")
_LARGE = 2**28
"""From this many bytes on, memory is page-locked in place. PyTorch's allocator of page-locked memory rounds
up to a power of two, so that 77 GB would take 137."""

BLOCK_BYTES = 2**28
"""Size of the pieces in which `in_blocks` divides tables."""


class HostCopies:
    """Buffers for copies of tensors: as much host memory as the tensors have on this rank.

    They are pinned if the tensors are on a GPU, and used again for the next copy.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor | ShardedTensor] = {}
        self._allocating: Future[dict[str, Tensor | ShardedTensor]] | None = None

    def prepare(self, tensors: dict[str, Tensor | ShardedTensor]) -> None:
        """Lets a thread allocate the buffers of tensors, for which `take` waits.

        Page-locking takes seconds for each 10 GB.
        """
        self._allocating = in_background(
            lambda: {name: _buffer(tensor) for name, tensor in tensors.items()}, "buffers"
        )

    def take(self, tensors: dict[str, Tensor | ShardedTensor]) -> dict[str, Tensor | ShardedTensor]:
        """Copies tensors and returns the copies, which the next call overwrites; waits until it is done."""
        if self._allocating is not None:
            self._copies, self._allocating = self._allocating.result(), None
        before = self._copies
        self._copies = {
            name: before[name] if _fits(before.get(name), tensor) else _buffer(tensor)
            for name, tensor in tensors.items()
        }
        waits = False
        for name, tensor in tensors.items():
            for source, target in zip(local_parts(tensor), local_parts(self._copies[name]), strict=True):
                target.copy_(source.detach(), non_blocking=True)
                waits |= source.is_cuda
        if waits:
            torch.cuda.current_stream().synchronize()
        return self._copies


def local_parts(tensor: Tensor | ShardedTensor) -> list[Tensor]:
    """Returns the tensors on this rank: a plain tensor, or this rank's shards of a sharded one."""
    return [x.tensor for x in tensor.local_shards()] if isinstance(tensor, ShardedTensor) else [tensor]


def placed_parts(tensor: Tensor | ShardedTensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Returns the tensors on this rank, each with the place of its first element in the whole tensor."""
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        return [(shard.tensor.detach(), tuple(shard.metadata.shard_offsets)) for shard in shards]
    return [(tensor.detach(), (0,) * tensor.dim())]


def copied(tensor: Tensor | ShardedTensor) -> Tensor | ShardedTensor:
    """Returns a contiguous copy on the same device, sharded in the same way."""
    if not isinstance(tensor, ShardedTensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    shards = [Shard(shard.tensor.detach().clone(), shard.metadata) for shard in tensor.local_shards()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, tensor.metadata(), process_group=tensor._process_group
    )


def in_blocks(tensor: Tensor | ShardedTensor) -> Tensor | ShardedTensor:
    """Returns a view of a tensor whose shards are blocks of rows, of up to `BLOCK_BYTES` each.

    A writer that copies one shard after the other to host memory then needs no more than that at a time. A
    plain tensor is returned as it is.
    """
    if not isinstance(tensor, ShardedTensor):
        return tensor
    metadata = copy.copy(tensor.metadata())
    metadata.shards_metadata = [
        block
        for shard in tensor.metadata().shards_metadata
        for block in _blocks(shard, tensor.dtype.itemsize)
    ]
    shards = []
    for shard in tensor.local_shards():
        start = shard.metadata.shard_offsets[0]
        for block in _blocks(shard.metadata, tensor.dtype.itemsize):
            first = block.shard_offsets[0] - start
            shards.append(Shard(shard.tensor.detach()[first : first + block.shard_sizes[0]], block))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group
    )


def _blocks(shard: ShardMetadata, itemsize: int) -> list[ShardMetadata]:
    """Divides a shard of a table [rows, columns], or of numbers for its rows [rows], into blocks of rows."""
    (start, *columns), (rows, *widths) = shard.shard_offsets, shard.shard_sizes
    size = max(1, BLOCK_BYTES // (itemsize * max(1, math.prod(widths))))
    return [
        ShardMetadata([start + first, *columns], [min(size, rows - first), *widths], shard.placement)
        for first in range(0, rows, size)
    ] or [shard]


def _fits(buffer: Tensor | ShardedTensor | None, tensor: Tensor | ShardedTensor) -> bool:
    if buffer is None or isinstance(buffer, ShardedTensor) != isinstance(tensor, ShardedTensor):
        return False
    places = [(part.shape, part.dtype) for part in local_parts(tensor)]
    return [(part.shape, part.dtype) for part in local_parts(buffer)] == places


def _buffer(tensor: Tensor | ShardedTensor) -> Tensor | ShardedTensor:
    """Returns an uninitialized tensor in host memory, sharded in the same way."""
    if not isinstance(tensor, ShardedTensor):
        return _empty(tensor)
    metadata = copy.deepcopy(tensor.metadata())
    metadata.tensor_properties.pin_memory = any(part.is_cuda for part in local_parts(tensor))
    local = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in tensor.local_shards()}
    shards = []
    for shard in metadata.shards_metadata:
        if shard.placement is not None:
            shard.placement._device = _CPU
        is_here = shard.placement is None or shard.placement.rank() == torch.distributed.get_rank()
        if is_here and tuple(shard.shard_offsets) in local:
            shards.append(Shard(_empty(local[tuple(shard.shard_offsets)]), shard))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=tensor._process_group
    )


def _empty(tensor: Tensor) -> Tensor:
    if tensor.nbytes < _LARGE or not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
    address, runtime = buffer.data_ptr(), torch.cuda.cudart()
    with torch.cuda.device(tensor.device):
        torch.cuda.check_error(runtime.cudaHostRegister(address, buffer.nbytes, 0))
    # Called before the memory is freed, at the end of the program too.
    weakref.finalize(buffer, runtime.cudaHostUnregister, address)
    return buffer
