"""Copies many tensors to a device in one transfer.

A batch has some forty small tensors. A copy of its own for each costs the host more than a step of a small
model costs the GPU, and memory that is not page-locked makes the host wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(tensors: Sequence[Tensor], device: torch.device, non_blocking: bool = False) -> list[Tensor]:
    """Returns copies of host tensors on a device, in the same order; they share one piece of memory there.

    Args:
        tensors: tensors in host memory, of any types and shapes.
        device: where to copy them.
        non_blocking: return before the copy has taken place; the host memory between is page-locked then.
    """
    # Wide types come first, so that every tensor starts at a multiple of its own size.
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())
    pieces = [_bytes_of(tensors[place]) for place in order]
    sizes = [len(piece) for piece in pieces]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=non_blocking and device.type == "cuda")
    torch.cat(pieces, out=host)
    copies: list[Tensor] = [host] * len(tensors)
    for place, piece in zip(order, host.to(device, non_blocking=non_blocking).split(sizes), strict=True):
        original = tensors[place]
        copies[place] = piece.view(original.dtype).view(original.shape)
    return copies


def _bytes_of(tensor: Tensor) -> Tensor:
    # A tensor of one number may have a stride of 0, which counts as contiguous and has no view as bytes.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
