"""`TensorSpec`: describes an input tensor of a graph, for packages."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Describes an input tensor.

    Attributes:
        name: the tensor's name.
        dtype: the tensor's dtype.
        dims: a name for each dimension, an identifier or a number; dimensions of equal names have equal
            sizes.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Returns JSON types, for a file."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch."), "dims": list(self.dims)}

    @classmethod
    def from_json(cls, entry: dict) -> "TensorSpec":
        """Reverses `to_json`."""
        return cls(entry["name"], getattr(torch, entry["dtype"]), tuple(entry["dims"]))
