"""`RqKmeans`: k-means on vectors, then on the residuals of each level for the next one."""

from collections.abc import Mapping

import torch
from torch import Tensor

from recsys.sid.quantizers.base import Fitted, Quantizer, decode_residuals, encode_residuals
from recsys.sid.quantizers.kmeans import kmeans


class RqKmeans(Quantizer):
    """Residual k-means; see `Quantizer`."""

    def __init__(self, centroids: Tensor):
        self.centroids = centroids

    @classmethod
    def fit(cls, vectors: Tensor, *, levels: int, size: int, balanced: bool, seed: int) -> Fitted:
        """Fits `levels` codebooks of `size` centroids on vectors [items, D], balanced by Sinkhorn or not."""
        generator = torch.Generator().manual_seed(seed)
        residuals, centroids, codes = vectors, [], []
        for _ in range(levels):
            clusters = kmeans(residuals, size, generator, balanced=balanced)
            residuals = residuals - clusters.centroids[clusters.assigned]
            centroids.append(clusters.centroids)
            codes.append(clusters.assigned)
        return Fitted(cls(torch.stack(centroids)), torch.stack(codes, 1))

    def encode(self, vectors: Tensor) -> Tensor:
        """See `Quantizer`."""
        return encode_residuals(vectors, self.centroids)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Quantizer`."""
        return decode_residuals(codes, self.centroids)

    def tensors(self) -> dict[str, Tensor]:
        """See `Quantizer`."""
        return {"centroids": self.centroids}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "RqKmeans":
        """See `Quantizer`."""
        return cls(tensors["centroids"])
