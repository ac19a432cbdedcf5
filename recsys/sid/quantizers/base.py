"""The interface of a quantizer, and the chain of residuals that two of them share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS = 4096
"""Number of vectors whose distances to all centroids are in memory at a time."""


class Fitted(NamedTuple):
    """A fitted quantizer and the codes of the vectors it was fitted on.

    With balanced assignment, these codes may differ from the nearest ones, which `encode` chooses.

    Attributes:
        quantizer: the quantizer, whose codebooks no longer change.
        codes: codes of the vectors, int64 [items, levels].
    """

    quantizer: "Quantizer"
    codes: Tensor


class Quantizer(ABC):
    """Turns vectors into codes with frozen codebooks.

    Attributes:
        centroids: float32 [levels, V, d].
    """

    centroids: Tensor

    @classmethod
    @abstractmethod
    def fit(cls, vectors: Tensor, **settings: Any) -> Fitted:
        """Fits codebooks on vectors [items, D]; each quantizer names its settings, `seed` among them."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """Returns the codes of vectors [items, D]: int64 [items, levels]."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Returns the vectors that codes [items, levels] represent, float32 [items, D]."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that `load` needs, by name."""

    @classmethod
    @abstractmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Quantizer":
        """Builds the quantizer that `tensors` came from."""


def nearest(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Returns the nearest centroid of each vector, int64 [items]; of equally near centroids the first."""
    lengths = centroids.square().sum(1)
    parts = [(lengths - 2 * rows @ centroids.T).argmin(1) for rows in vectors.split(_ROWS)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)


def encode_residuals(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Encodes level by level by the centroid nearest to the residual; returns int64 [items, levels]."""
    codes = []
    for level in centroids:
        codes.append(nearest(vectors, level))
        vectors = vectors - level[codes[-1]]
    return torch.stack(codes, 1)


def decode_residuals(codes: Tensor, centroids: Tensor) -> Tensor:
    """Returns the sum of the centroids of all levels, [items, d]."""
    levels = torch.arange(len(centroids))
    return centroids[levels, codes].sum(1)
