"""Measures the bytes that a piece of code leaves alive, for tests of what autograd keeps."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """While active, notes every storage that an operation makes; `alive` adds up what somebody still holds.

    Unlike hooks on saved tensors it sees all holders: graph nodes, hooks, closures.
    """

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in before:
                storage = leaf.untyped_storage()
                self.sizes[_key(leaf)] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> int:
        """Bytes."""
        return sum(size for storage, size in self.sizes.values() if not storage.expired())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
