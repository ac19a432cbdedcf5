"""Saves memory by recomputing intermediate results in the backward pass.

`torch.utils.checkpoint` drops the tensors that are saved inside a function. `rebuilt_in_backward` drops
tensors wherever they are saved, so that a step between two dropped tensors (attention) need not run again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Watch = Callable[[Sequence[Tensor]], None]
"""Registers tensors that autograd must not keep from now on, in the order in which they are rebuilt."""


@contextmanager
def rebuilt_in_backward(make: Callable[[], Sequence[Tensor]], device_type: str) -> Iterator[Watch]:
    """Keeps autograd from saving watched tensors and views of them; backward calls `make` instead.

    `make` runs once for all of them, without gradients and in the current autocast state. Its result is freed
    with the last graph node that needs it. It must reproduce the watched tensors bit by bit.

    Args:
        make: returns the watched tensors, in the same order and memory layout.
        device_type: device of the tensors, whose autocast state is used.
    """
    recipe = _Recipe(make, _autocast_as_now(device_type))
    # Keep strong references: if a storage were freed here, another tensor could get its address.
    watched: dict[int, tuple[int, Tensor]] = {}

    def watch(tensors: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            watched.setdefault(tensor.untyped_storage()._cdata, (number, tensor))

    def pack(tensor: Tensor) -> "Tensor | _View":
        number, original = watched.get(tensor.untyped_storage()._cdata, (0, None))
        if original is None or original.dtype != tensor.dtype:
            # Detach, because a node that saves its own output with its history would keep itself alive.
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
    """A function that recomputes tensors, with its result after the first request."""

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
    """A placeholder for a saved view of tensor `number` of a recipe."""

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
