"""`CodeTrie`: the codes of all items as a tree, in compressed rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn


class CodeTrie(nn.Module):
    """Holds the prefixes of all codes, with the nodes of each depth in lexicographic order.

    A node of depth l + 1 is an edge of a node of depth l: `first(l)` says where the edges of each node
    begin, `token(l)` the code of each edge and `parent(l)` its node. The root is the only node of depth 0,
    and node i of the last depth is the item `item[i]`, so item k is the node `leaf[k]`. All of them are int32
    buffers, some 40 MB for a million items of 3 codes and a digit. The codes give them, so no checkpoint has
    them.

    Args:
        codes: int64 [items, levels], no two rows equal.
        sizes: number of values of each level.

    Attributes:
        sizes: number of values of each level.
        counts: number of edges of each level; the last one is the number of items.
        most_children: the most edges that a node has, for each level.

    Raises:
        ValueError: two items have the same codes, or a code is not below its size.
    """

    item: Tensor
    leaf: Tensor

    def __init__(self, codes: np.ndarray, sizes: Sequence[int]):
        super().__init__()
        if len(codes) and ((codes < 0) | (codes >= np.asarray(sizes))).any():
            raise ValueError(f"codes go from 0 to the sizes of their levels, {tuple(sizes)}, less 1")
        order = np.lexsort(codes.T[::-1])
        ordered = codes[order]
        self.sizes = tuple(sizes)
        self.counts: list[int] = []
        self.most_children: list[int] = []
        self._add("item", order)
        self._add("leaf", order.argsort())
        node, count = np.zeros(len(order), np.int64), 1  # of depth l, for each item in order
        new = np.arange(len(order)) == 0
        for level in range(codes.shape[1]):
            new = new | (np.diff(ordered[:, level], prepend=-1) != 0)
            parent = node[new]
            first = np.searchsorted(parent, np.arange(count + 1))
            node, count = np.cumsum(new) - 1, len(parent)
            items = np.bincount(node, minlength=count)
            arrays = {"first": first, "parent": parent, "token": ordered[new, level], "items": items}
            for name, array in arrays.items():
                self._add(f"{name}_{level}", array)
            self.counts.append(count)
            self.most_children.append(int(np.diff(first).max(initial=0)))
        if count < len(order):
            raise ValueError("two items have the same codes")

    @property
    def levels(self) -> int:
        """Number of codes of an item."""
        return len(self.sizes)

    def first(self, level: int) -> Tensor:
        """Returns [nodes of depth `level` + 1]: the first edge of each node, then their number."""
        return self.get_buffer(f"first_{level}")

    def parent(self, level: int) -> Tensor:
        """Returns [edges]: the node of depth `level` that each edge leaves."""
        return self.get_buffer(f"parent_{level}")

    def token(self, level: int) -> Tensor:
        """Returns [edges]: the code of each edge of the nodes of depth `level`."""
        return self.get_buffer(f"token_{level}")

    def items(self, level: int) -> Tensor:
        """Returns [edges]: the number of items below each edge of the nodes of depth `level`."""
        return self.get_buffer(f"items_{level}")

    def path(self, items: Tensor) -> list[Tensor]:
        """Returns for each level the edge on the path to each of the given items, int64 [n] each."""
        edges = [self.leaf[items].long()]
        for level in range(self.levels - 1, 0, -1):
            edges.insert(0, self.parent(level)[edges[0]].long())
        return edges

    def _add(self, name: str, array: np.ndarray) -> None:
        self.register_buffer(name, torch.from_numpy(array.astype(np.int32)), persistent=False)
