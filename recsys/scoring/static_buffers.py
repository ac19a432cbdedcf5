"""Tensors that stay where they are on the device, as CUDA graphs need them, filled by one transfer."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: kernels read up to 16 at once, from multiples of as many."""

_NUM_HOST_COPIES = 2
"""Pieces of host memory that take turns, so that the host fills one while the device reads the other."""

Key = TypeVar("Key", bound=Hashable)


class _HostCopy(NamedTuple):
    """Host memory for all tensors, page-locked for a GPU.

    Attributes:
        memory: uint8 [bytes].
        arrays: views of the memory by name.
        copied: the end of the last transfer; None on a CPU, where transfers do not go on by themselves.
    """

    memory: Tensor
    arrays: dict
    copied: torch.cuda.Event | None


class StaticBuffers(Generic[Key]):
    """Zeros of given shapes and types, by name, in one piece of device memory.

    Args:
        forms: by name, shape and type.
        device: where the tensors are.

    Attributes:
        tensors: by name, views of the memory.
    """

    def __init__(
        self, forms: Mapping[Key, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        places, end = {}, 0
        for name, (shape, dtype) in forms.items():
            size = int(np.prod(shape)) * dtype.itemsize
            places[name] = (end, size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT

        def views(memory: Tensor) -> dict[Key, Tensor]:
            return {
                name: memory[start : start + size].view(forms[name][1]).view(forms[name][0])
                for name, (start, size) in places.items()
            }

        self._memory = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = views(self._memory)
        self._host: list[_HostCopy] = []
        is_cuda = device.type == "cuda"
        for _ in range(_NUM_HOST_COPIES):
            memory = torch.zeros(end, dtype=torch.uint8, pin_memory=is_cuda)
            arrays = {name: tensor.numpy() for name, tensor in views(memory).items()}
            self._host.append(_HostCopy(memory, arrays, torch.cuda.Event() if is_cuda else None))

    @contextmanager
    def filling(self, *, cleared: bool = True) -> Iterator[dict[Key, np.ndarray]]:
        """Yields arrays of zeros by name; at the end of the block, their contents go to the tensors.

        With `cleared=False` the arrays are as an earlier block left them, at first zeros.
        """
        host = self._host[0]
        self._host.append(self._host.pop(0))
        if host.copied is not None:
            host.copied.synchronize()
        if cleared:
            host.memory.zero_()
        yield host.arrays
        self._memory.copy_(host.memory, non_blocking=True)
        if host.copied is not None:
            host.copied.record()
