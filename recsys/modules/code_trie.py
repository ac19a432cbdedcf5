"""`CodeTrie`: the codes of items as a tree, in compressed rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from recsys.ops.beam_step import TrieEdges


class CodeTrie(nn.Module):
    """Holds the prefixes of the codes of items, with the nodes of each depth in lexicographic order.

    A node of depth l + 1 is an edge of a node of depth l: `first(l)` says where the edges of each node
    begin, `token(l)` the code of each edge and `parent(l)` its node. The root is the only node of depth 0,
    and node i of the last depth, the leaf i, is the item `item[i]`, so item k is the leaf `leaf[k]`, which
    is the number of leaves for an item that the trie leaves out. The leaves below a node are consecutive,
    see `leaves(l)`. All of them are int32 buffers, some 40 MB for a million items of 3 codes and a digit.
    The codes give them, so no checkpoint has them.

    Args:
        codes: int64 [items, levels], no two rows equal. The trie is built on the device of a tensor.
        sizes: number of values of each level.
        items: int64, the items that the trie holds, ascending; None for all.

    Attributes:
        sizes: number of values of each level.
        counts: number of edges of each level; the last one is the number of leaves.
        most_children: the most edges that a node has, for each level.

    Raises:
        ValueError: two items have the same codes, or a code is not below its size.
    """

    item: Tensor
    leaf: Tensor

    def __init__(
        self, codes: np.ndarray | Tensor, sizes: Sequence[int], items: np.ndarray | Tensor | None = None
    ):
        super().__init__()
        codes = torch.as_tensor(codes)
        if len(codes) and bool(((codes < 0) | (codes >= torch.tensor(sizes, device=codes.device))).any()):
            raise ValueError(f"codes go from 0 to the sizes of their levels, {tuple(sizes)}, less 1")
        order = torch.arange(len(codes), device=codes.device) if items is None else torch.as_tensor(items)
        places = torch.arange(len(order), device=codes.device)
        for level in range(codes.shape[1] - 1, -1, -1):
            order = order[codes[order, level].argsort(stable=True)]
        self.sizes = tuple(sizes)
        self.counts: list[int] = []
        self.most_children: list[int] = []
        self._add("item", order)
        self._add("leaf", order.new_full((len(codes),), len(order)).index_copy_(0, order, places))
        node, count = torch.zeros_like(places), 1  # of depth l, for each item in order
        new = places == 0
        for level in range(codes.shape[1]):
            code = codes[order, level]
            new[1:] |= code[1:] != code[:-1]
            begin = new.nonzero()[:, 0]
            parent = node[begin]
            first = torch.searchsorted(parent, torch.arange(count + 1, device=codes.device))
            node, count = new.cumsum(0) - 1, len(parent)
            leaves = torch.cat([begin, begin.new_tensor([len(order)])])
            arrays = {"first": first, "parent": parent, "token": code[begin], "leaves": leaves}
            for name, array in arrays.items():
                self._add(f"{name}_{level}", array)
            self.counts.append(count)
            self.most_children.append(int(first.diff().max()))
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

    def leaves(self, level: int) -> Tensor:
        """Returns [edges + 1]: the first leaf below each edge of the nodes of depth `level`, then their
        number."""
        return self.get_buffer(f"leaves_{level}")

    def edges(self, level: int) -> TrieEdges:
        """Returns the edges of the nodes of depth `level`."""
        tensors = (self.first(level), self.token(level), self.leaves(level))
        return TrieEdges(*tensors, self.item.shape[0], self.most_children[level])

    def path(self, items: Tensor) -> list[Tensor]:
        """Returns for each level the edge on the path to each of some items of the trie, int64 [n] each."""
        edges = [self.leaf[items].long()]
        for level in range(self.levels - 1, 0, -1):
            edges.insert(0, self.parent(level)[edges[0]].long())
        return edges

    def _add(self, name: str, array: Tensor) -> None:
        self.register_buffer(name, array.int(), persistent=False)
