"""Defines `SavedCalls`: several autograd functions run one after the other inside a single one.

PyTorch's overhead for an autograd function is then paid once for all of them, which saves some 20 us of host
time per function in forward, and as much in backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class SavedCall:
    """One call of an autograd function: the context that its `forward` leaves to its `backward`."""

    def __init__(self, function: type[torch.autograd.Function], needs_input_grad: Sequence[bool]):
        self.function = function
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Sequence[Tensor | None] = ()
        self.count = 0

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Stores tensors until `SavedCalls.save` hands them to the outer context."""
        self.saved_tensors, self.count = tensors, len(tensors)

    def gradients(self, *grad_outputs: Tensor) -> Any:
        """Returns the gradients of all arguments, once after each `SavedCalls.restored`: the saved tensors
        are released.

        The outer backward is `once_differentiable`, so this one runs without that decorator.
        """
        gradients = inspect.unwrap(self.function.backward)(self, *grad_outputs)
        self.saved_tensors = ()
        return gradients


class SavedCalls(list[SavedCall]):
    """The saved calls, in the order in which they ran."""

    def run(
        self,
        function: type[torch.autograd.Function],
        arguments: Sequence[Any],
        needs_input_grad: Sequence[bool] = (),
    ) -> Any:
        """Runs `function.apply(*arguments)` without creating a node for it.

        Args:
            needs_input_grad: for a backward that reads `ctx.needs_input_grad`.
        """
        self.append(SavedCall(function, needs_input_grad))
        return function.forward(self[-1], *arguments)

    def save(self, ctx: Any, *others: Tensor) -> None:
        """Saves the tensors of all calls, then `others`, in the outer context, and these calls as
        `ctx.calls`."""
        ctx.save_for_backward(*(tensor for call in self for tensor in call.saved_tensors), *others)
        ctx.calls = self
        for call in self:
            call.saved_tensors = ()

    def restored(self, saved: Sequence[Tensor | None]) -> SavedCalls:
        """Returns these calls, ready for `SavedCall.gradients`; `saved` is `saved_tensors` of the outer
        context."""
        first = 0
        for call in self:
            call.saved_tensors = saved[first : first + call.count]
            first += call.count
        return self
