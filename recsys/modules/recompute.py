"""Less memory for more work: intermediate results that the backward pass computes again.

`torch.utils.checkpoint` drops what is saved inside a function; `rebuilt_in_backward` drops tensors that are
saved by whoever reads them, so that a step between two dropped ones (attention) need not run again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Watch = Callable[[Sequence[Tensor]], None]
"""Names tensors, in the order of what rebuilds them, that must not be kept from now on."""


@contextmanager
def rebuilt_in_backward(make: Callable[[], Sequence[Tensor]], device_type: str) -> Iterator[Watch]:
    """While active, autograd keeps no watched tensor and no view of one: backward calls `make` instead.

    `make` runs once for all of them, without gradients and in the autocast state of now, and its result is
    freed with the last node of the graph that needs it. It must repeat bit by bit what was watched.

    Args:
        make: returns the same tensors as are watched, in the same order and memory layout.
        device_type: where they are; whose autocast state counts.
    """
    recipe = _Recipe(make, _autocast_as_now(device_type))
    # Strong references: a storage that were freed in here could lend its address to another tensor.
    watched: dict[int, tuple[int, Tensor]] = {}

    def watch(tensors: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            watched.setdefault(tensor.untyped_storage()._cdata, (number, tensor))

    def pack(tensor: Tensor) -> "Tensor | _View":
        number, original = watched.get(tensor.untyped_storage()._cdata, (0, None))
        if original is None or original.dtype != tensor.dtype:
            # Detached, since a node that kept its own output with its history would keep itself alive.
            return tensor.detach()
        return _View(recipe, number, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: "Tensor | _View") -> Tensor:
        return packed.rebuild() if isinstance(packed, _View) else packed

    try:
        with saved_tensors_hooks(pack, unpack):
            yield watch
    finally:
        watched.clear()


class _Recipe:
    """How tensors are made again, and the result once somebody has asked for it."""

    def __init__(self, make: Callable[[], Sequence[Tensor]], context: Callable[[], AbstractContextManager]):
        self.make = make
        self.context = context
        self.made: Sequence[Tensor] | None = None

    def __getitem__(self, number: int) -> Tensor:
        if self.made is None:
            with torch.no_grad(), self.context():
                self.made = self.make()
        return self.made[number]


@dataclass(frozen=True, eq=False)
class _View:
    """Stands for a saved view of the tensor that a recipe makes as its `number`-th."""

    recipe: _Recipe
    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def rebuild(self) -> Tensor:
        return self.recipe[self.number].as_strided(self.shape, self.stride, self.offset)


def _autocast_as_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    settings = {
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
    return lambda: torch.autocast(device_type, **settings)
