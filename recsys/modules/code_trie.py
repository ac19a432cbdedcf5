"""`CodeTrie`: the codes of all items as a tree, in compressed rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class CodeTrie(nn.Module):
    """Holds the prefixes of all codes, with the nodes of each depth in lexicographic order.

    Each node of depth l + 1 is an edge of a node of depth l: `first(l)` gives the first edge of each node,
    `token(l)` the code of each edge, and `parent(l)` the node that it leaves. The root is the only node of
    depth 0, and node i of the last depth is the item `item[i]`. All of these are buffers, so checkpoints
    contain them.

    Args:
        codes: int64 [items, levels], no two rows equal.
        sizes: number of values of each level.

    Raises:
        ValueError: two items have the same codes, or a code is not below its size.
    """

    item: Tensor

    def __init__(self, codes: np.ndarray, sizes: Sequence[int]):
        super().__init__()
        if len(codes) and ((codes < 0) | (codes >= np.asarray(sizes))).any():
            raise ValueError(f"codes go from 0 to the sizes of their levels, {tuple(sizes)}, less 1")
        order = np.lexsort(codes.T[::-1])
        ordered = codes[order]
        self.sizes = tuple(sizes)
        self.register_buffer("item", torch.from_numpy(order))
        node, count = np.zeros(len(order), np.int64), 1  # of depth l, for each item in order
        new = np.arange(len(order)) == 0
        for level in range(codes.shape[1]):
            new = new | (np.diff(ordered[:, level], prepend=-1) != 0)
            parent, token = node[new], ordered[new, level]
            first = np.searchsorted(parent, np.arange(count + 1))
            for name, array in (("first", first), ("parent", parent), ("token", token)):
                self.register_buffer(f"{name}_{level}", torch.from_numpy(array.astype(np.int64)))
            node, count = np.cumsum(new) - 1, len(parent)
        if count < len(order):
            raise ValueError("two items have the same codes")

    @property
    def levels(self) -> int:
        """Number of codes of an item."""
        return len(self.sizes)

    def first(self, level: int) -> Tensor:
        """Returns int64 [nodes of depth `level` + 1]: the first edge of each node, then their number."""
        return self.get_buffer(f"first_{level}")

    def parent(self, level: int) -> Tensor:
        """Returns int64 [edges]: the node of depth `level` that each edge leaves."""
        return self.get_buffer(f"parent_{level}")

    def token(self, level: int) -> Tensor:
        """Returns int64 [edges]: the code of each edge of the nodes of depth `level`."""
        return self.get_buffer(f"token_{level}")
