"""`Opq`: a learned rotation, then one independent code for each of m parts of the vector.

faiss learns rotation and centroids (Ge, He, Ke and Sun, "Optimized product quantization", 2013); encoding
does not need faiss. The codes have no order, so parallel heads can predict them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from recsys.errors import ConfigError, InstallationError
from recsys.sid.quantizers.base import Fitted, Quantizer, nearest


class Opq(Quantizer):
    """Optimized product quantization; see `Quantizer`.

    Args:
        rotation: float32 [D, D]; a vector x becomes rotation @ x.
        centroids: float32 [m, V, D / m].
    """

    def __init__(self, rotation: Tensor, centroids: Tensor):
        self._rotation, self.centroids = rotation, centroids

    @classmethod
    def fit(cls, vectors: Tensor, *, levels: int, size: int, seed: int) -> Fitted:
        """Fits m = `levels` codebooks of `size` centroids on vectors [items, D].

        Raises:
            InstallationError: faiss is not installed.
            ConfigError: D is not a multiple of m, or `size` is not a power of 2.
        """
        bits, dim = size.bit_length() - 1, vectors.shape[1]
        if size != 1 << bits or not 1 <= bits <= 8:
            raise ConfigError(f"--size {size}: opq takes 2, 4, 8, ... or 256")
        if dim % levels:
            raise ConfigError(
                f"--levels {levels}: opq cuts the {dim} numbers of a vector into equal parts; take 16 or 32"
            )
        try:
            import faiss
        except ImportError as error:
            raise InstallationError(
                f"--quantizer opq: faiss is not installed ({error}); type: python -m pip install faiss-cpu"
            ) from None
        matrix = np.ascontiguousarray(vectors.numpy(), np.float32)
        codebook = faiss.ProductQuantizer(dim, levels, bits)
        codebook.cp.seed = seed % 2**31
        codebook.cp.min_points_per_centroid = 1
        opq = faiss.OPQMatrix(dim, levels)
        opq.pq = codebook
        opq.train(matrix)
        rotation = faiss.vector_to_array(opq.A).reshape(dim, dim).copy()
        final = faiss.ProductQuantizer(dim, levels, bits)
        final.cp.seed, final.cp.min_points_per_centroid = seed % 2**31, 1
        final.train(np.ascontiguousarray(matrix @ rotation.T))
        centroids = faiss.vector_to_array(final.centroids).reshape(levels, size, dim // levels).copy()
        quantizer = cls(torch.from_numpy(rotation), torch.from_numpy(centroids))
        return Fitted(quantizer, quantizer.encode(vectors))

    def encode(self, vectors: Tensor) -> Tensor:
        """See `Quantizer`."""
        parts = (vectors @ self._rotation.T).chunk(len(self.centroids), 1)
        pairs = zip(parts, self.centroids, strict=True)
        return torch.stack([nearest(part, centroids) for part, centroids in pairs], 1)

    def decode(self, codes: Tensor) -> Tensor:
        """See `Quantizer`."""
        levels = torch.arange(len(self.centroids))
        return self.centroids[levels, codes].flatten(1) @ self._rotation

    def tensors(self) -> dict[str, Tensor]:
        """See `Quantizer`."""
        return {"rotation": self._rotation, "centroids": self.centroids}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Opq":
        """See `Quantizer`."""
        return cls(tensors["rotation"], tensors["centroids"])
