"""`TensorSpec`: one input of a graph from flat tensors, as packages name it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """One input.

    Attributes:
        name: the tensor's name.
        dtype: the tensor's dtype.
        dims: a name for each dimension, an identifier; equal names are equal sizes.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Plain types, for a file."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch."), "dims": list(self.dims)}

    @classmethod
    def from_json(cls, entry: dict) -> "TensorSpec":
        """The reverse of `to_json`."""
        return cls(entry["name"], getattr(torch, entry["dtype"]), tuple(entry["dims"]))
