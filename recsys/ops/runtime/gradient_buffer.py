"""Defines `GradientBuffer`: one tensor for the gradients of all column ranges of another tensor.

A projection returns u, v, q and k side by side, and its backward needs their gradients side by side. Ops that
know the buffer of their inputs write gradients directly into it, so that nothing has to be concatenated.
Using the buffer is optional: `joined` copies gradients that lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientBuffer:
    """Memory for the gradients of the column ranges of a tensor [T, N], for one backward pass at a time.

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
