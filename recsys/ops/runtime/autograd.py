"""Defines pieces of autograd functions: `GradientBuffer`, for gradients side by side, and `SavedCalls`, for
several functions inside a single one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GradientBuffer:
    """Memory for the gradients of the column ranges of a tensor [T, N], for one backward pass at a time.

    A projection returns u, v, q and k side by side, and its backward needs their gradients side by side. Ops
    that know the buffer of their inputs write gradients directly into it, so that nothing has to be
    concatenated. Using the buffer is optional: `joined` copies gradients that lie elsewhere.

    Nothing is allocated before the first `place`. `joined` empties the buffer, which can then be used again.
    """

    def __init__(self, widths: Sequence[int]):
        """`widths`: number of columns of each range, in order."""
        self.widths = tuple(widths)
        self._memory: Tensor | None = None

    def place(self, part: Tensor) -> Tensor:
        """Returns uninitialized memory for the gradient of `part`, in its shape.

        Args:
            part: a view of one column range, [T, columns] or [T, H, D], of a tensor [T, N] that begins at the
                start of its storage. Any other tensor gets memory of its own.
        """
        shape, strides, columns = part.shape, part.stride(), sum(self.widths)
        first, width = part.storage_offset(), shape[1:].numel()
        is_dense = strides[0] == columns and strides[-1] == 1 and (len(shape) == 2 or strides[1] == shape[2])
        if not is_dense or first + width > columns or shape[0] < 2:
            return torch.empty(shape, dtype=part.dtype, device=part.device)
        if self._memory is None:
            self._memory = torch.empty(shape[0], columns, dtype=part.dtype, device=part.device)
        return self._memory.as_strided(shape, strides, first)

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
        """Returns [T, N] with the gradients of all ranges, each [T, width]; copies only those outside the
        buffer."""
        memory, self._memory = self._memory, None
        if len(gradients) == 1:
            return gradients[0]
        if memory is None or memory.dtype != gradients[0].dtype:
            return torch.cat(list(gradients), dim=1)
        address, first, columns = memory.data_ptr(), 0, memory.shape[1]
        for width, gradient in zip(self.widths, gradients, strict=True):
            in_place = gradient.data_ptr() == address and gradient.stride() == (columns, 1)
            if not in_place:
                memory[:, first : first + width].copy_(gradient)
            first += width
            address += width * memory.element_size()
        return memory


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
    """Saved calls, in the order in which they ran.

    PyTorch's overhead for an autograd function is paid once for all of them, which saves some 20 us of host
    time per function in forward, and as much in backward.
    """

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
