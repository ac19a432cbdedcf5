"""Copies a run's tensors to host memory, so that they can be written while training changes them.

torch's own stagers do not copy sharded tensors that are on the CPU already, or copy them twice.
"""

import copy
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard
from torchrec.distributed.types import ShardedTensor

from recsys.training.background import in_background

_CPU = torch.device("cpu")


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
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
