"""Autograd functions behind one another within a single one: what PyTorch does around a function, it does
once for all of them. That is some 20 us on the host, forward, and as much backward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Part:
    """One of the functions; the context that its `forward` leaves to its `backward`."""

    def __init__(self, function: type[torch.autograd.Function], needs_input_grad: Sequence[bool]):
        self.function = function
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Sequence[Tensor | None] = ()
        self.count = 0

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Until `Parts.save`, here."""
        self.saved_tensors, self.count = tensors, len(tensors)

    def gradients(self, *grad_outputs: Tensor) -> Any:
        """Of all arguments; once for each `Parts.restored`, since what was saved is let go of.

        The backward of the whole is `once_differentiable`, so that of a part runs without this decorator.
        """
        found = inspect.unwrap(self.function.backward)(self, *grad_outputs)
        self.saved_tensors = ()
        return found


class Parts(list[Part]):
    """The functions, in the order in which they ran."""

    def run(
        self,
        function: type[torch.autograd.Function],
        arguments: Sequence[Any],
        needs_input_grad: Sequence[bool] = (),
    ) -> Any:
        """`function.apply(*arguments)`, without a node; `needs_input_grad`: for a backward that asks."""
        self.append(Part(function, needs_input_grad))
        return function.forward(self[-1], *arguments)

    def save(self, ctx: Any, *others: Tensor) -> None:
        """Hands what the functions have saved to the context of the whole, and itself as `ctx.parts`; then
        `others`, the last of `ctx.saved_tensors`."""
        ctx.save_for_backward(*(tensor for part in self for tensor in part.saved_tensors), *others)
        ctx.parts = self
        for part in self:
            part.saved_tensors = ()

    def restored(self, saved: Sequence[Tensor | None]) -> Parts:
        """Itself, ready for `gradients`; `saved`: `saved_tensors` of the context of the whole."""
        first = 0
        for part in self:
            part.saved_tensors = saved[first : first + part.count]
            first += part.count
        return self
