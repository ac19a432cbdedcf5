"""`GradientRoom`: one tensor for the gradients of all parts of another, each written in its place.

A projection gives u, v, q and k side by side, and its backward wants their gradients side by side. Ops that
know the room of their inputs write there; then nobody has to join them. A room is an offer: ops may ignore
it, and `joined` takes in whatever lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientRoom:
    """For the gradients of the column ranges of one tensor [T, N]; used by one backward pass at a time.

    Nothing is allocated before the first `place`. A room that has been emptied by `joined` can be used again.
    """

    def __init__(self, widths: Sequence[int]):
        """`widths` of the ranges, first column first."""
        self.widths = tuple(widths)
        self._whole: Tensor | None = None

    def place(self, part: Tensor) -> Tensor:
        """Uninitialised memory for the gradient of `part`, in its shape.

        Args:
            part: a view of one range of a tensor [T, N] that starts its storage, [T, columns] or [T, H, D];
                or any other tensor, which gets memory of its own.
        """
        shape, strides, columns = part.shape, part.stride(), sum(self.widths)
        first, width = part.storage_offset(), shape[1:].numel()
        is_dense = strides[0] == columns and strides[-1] == 1 and (len(shape) == 2 or strides[1] == shape[2])
        if not is_dense or first + width > columns or shape[0] < 2:
            return torch.empty(shape, dtype=part.dtype, device=part.device)
        if self._whole is None:
            self._whole = torch.empty(shape[0], columns, dtype=part.dtype, device=part.device)
        return self._whole.as_strided(shape, strides, first)

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
        """[T, N] from the gradients of all ranges, [T, width] each; those in their place are not moved."""
        whole, self._whole = self._whole, None
        if len(gradients) == 1:
            return gradients[0]
        if whole is None or whole.dtype != gradients[0].dtype:
            return torch.cat(list(gradients), dim=1)
        address, first, columns = whole.data_ptr(), 0, whole.shape[1]
        for width, gradient in zip(self.widths, gradients, strict=True):
            in_place = gradient.data_ptr() == address and gradient.stride() == (columns, 1)
            if not in_place:
                whole[:, first : first + width].copy_(gradient)
            first += width
            address += width * whole.element_size()
        return whole
