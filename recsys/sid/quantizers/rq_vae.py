"""`RqVae`: an autoencoder whose narrow middle is quantized level by level, each level on the last residual.

Sources: Lee et al., "Autoregressive image generation using residual quantization", 2022; Rajput et al.,
"Recommender systems with generative retrieval", 2023.
Codebooks are moving averages of the vectors assigned to them. Trained by gradients, most codes would die.
"""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.sid.quantizers.base import Fitted, Quantizer, decode_residuals, encode_residuals, nearest
from recsys.sid.quantizers.kmeans import kmeans, sinkhorn_assignment

WIDTHS = (512, 256, 128, 32)
"""Widths of the encoder's layers; the decoder has them in reverse order."""

DECAY = 0.99
COMMITMENT = 0.25
"""Weight of the distance between an encoded vector and its codes (beta in the literature)."""

BATCH, LEARNING_RATE, WEIGHT_DECAY = 1024, 1e-3, 0.01
DEAD = 0.1
"""A code restarts at an encoded vector if it gets less than this fraction of an even share of the batch."""


class RqVae(Quantizer):
    """Residual-quantized autoencoder; see `Quantizer`.

    Args:
        dim: width of a vector.
        levels, size: number of codebooks, and of centroids in each.
    """

    def __init__(self, dim: int, levels: int, size: int):
        self._encoder = _mlp((dim, *WIDTHS))
        self._decoder = _mlp((*WIDTHS[::-1], dim))
        self.centroids = torch.zeros(levels, size, WIDTHS[-1])
        self._scale = torch.ones(())

    @classmethod
    def fit(
        cls, vectors: Tensor, *, levels: int, size: int, steps: int, balanced_last: bool, seed: int
    ) -> Fitted:
        """Trains on vectors [items, D] for `steps` batches.

        Args:
            vectors: float32.
            levels, size: number of codebooks, and of centroids in each.
            steps: number of AdamW steps, each on a batch of `BATCH` vectors.
            balanced_last: whether to assign the codes of the last level by Sinkhorn, in training and at the
                end.
            seed: seed of weights, batches and initial codebooks.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self = cls(vectors.shape[1], levels, size)
        # Unit vectors have entries far below 1. Without scaling, the encoder would start with a single code.
        self._scale = vectors.square().mean().rsqrt()
        vectors = vectors * self._scale
        weights = [*self._encoder.parameters(), *self._decoder.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        books: _Codebooks | None = None
        for rows in itertools.islice(_batches(len(vectors), generator), steps):
            encoded = self._encoder(vectors[rows])
            if books is None:
                books = _Codebooks(encoded.detach(), levels, size, generator)
            codes = books.update(encoded.detach(), balanced_last=balanced_last)
            quantized = decode_residuals(codes, books.centroids)
            through = encoded + (quantized - encoded).detach()
            loss = functional.mse_loss(self._decoder(through), vectors[rows], reduction="sum") / len(rows)
            loss = loss + COMMITMENT * functional.mse_loss(encoded, quantized, reduction="sum") / len(rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.centroids = books.centroids if books is not None else self.centroids
        return Fitted(self, self._codes(vectors / self._scale, balanced_last=balanced_last))

    @torch.no_grad()
    def _codes(self, vectors: Tensor, *, balanced_last: bool) -> Tensor:
        encoded = self._encoder(vectors * self._scale)
        codes = encode_residuals(encoded, self.centroids)
        if balanced_last:
            residuals = encoded - decode_residuals(codes[:, :-1], self.centroids[:-1])
            codes[:, -1] = sinkhorn_assignment(residuals, self.centroids[-1])
        return codes

    def encode(self, vectors: Tensor) -> Tensor:
        """See `Quantizer`."""
        return self._codes(vectors, balanced_last=False)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """See `Quantizer`."""
        return self._decoder(decode_residuals(codes, self.centroids)) / self._scale

    def tensors(self) -> dict[str, Tensor]:
        """See `Quantizer`."""
        parts = {"encoder": self._encoder, "decoder": self._decoder}
        named = {
            f"{part}.{name}": w.detach() for part, mlp in parts.items() for name, w in mlp.named_parameters()
        }
        return {"centroids": self.centroids, "scale": self._scale, **named}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "RqVae":
        """See `Quantizer`."""
        centroids = tensors["centroids"]
        self = cls(tensors["encoder.0.weight"].shape[1], len(centroids), centroids.shape[1])
        for part, mlp in {"encoder": self._encoder, "decoder": self._decoder}.items():
            prefix = f"{part}."
            mlp.load_state_dict(
                {name.removeprefix(prefix): w for name, w in tensors.items() if name.startswith(prefix)}
            )
        self.centroids, self._scale = centroids, tensors["scale"]
        return self


class _Codebooks:
    """Codebooks that follow the encoded vectors by moving averages.

    Args:
        first: encoded vectors of the first batch, from which k-means computes the initial codebooks.
        levels, size: as for `RqVae`.
        generator: generator of starts and restarts.
    """

    def __init__(self, first: Tensor, levels: int, size: int, generator: torch.Generator):
        self._generator = generator
        centroids, counts = [], []
        for _ in range(levels):
            clusters = kmeans(first, size, generator)
            first = first - clusters.centroids[clusters.assigned]
            centroids.append(clusters.centroids)
            counts.append(torch.bincount(clusters.assigned, minlength=size).clamp(min=1))
        self.centroids, self._counts = torch.stack(centroids), torch.stack(counts).float()
        self._sums = self.centroids * self._counts[..., None]

    def update(self, encoded: Tensor, *, balanced_last: bool) -> Tensor:
        """Assigns a batch [rows, d] to codes, int64 [rows, levels], and moves the codebooks towards it."""
        codes, residuals, last = [], encoded, len(self.centroids) - 1
        for level, centroids in enumerate(self.centroids.clone()):
            assign = sinkhorn_assignment if balanced_last and level == last else nearest
            code = assign(residuals, centroids)
            self._move(level, residuals, code)
            residuals = residuals - centroids[code]
            codes.append(code)
        return torch.stack(codes, 1)

    def _move(self, level: int, residuals: Tensor, code: Tensor) -> None:
        counts, sums = self._counts[level], self._sums[level]
        counts.lerp_(torch.bincount(code, minlength=len(counts)).float(), 1 - DECAY)
        sums.lerp_(torch.zeros_like(sums).index_add_(0, code, residuals), 1 - DECAY)
        even = len(residuals) / len(counts)
        dead = torch.nonzero(counts < DEAD * even)[:, 0]
        if len(dead):
            rows = torch.randint(len(residuals), (len(dead),), generator=self._generator)
            counts[dead], sums[dead] = even, residuals[rows] * even
        self.centroids[level] = sums / counts[:, None]


def _batches(items: int, generator: torch.Generator):
    """Yields the rows of batches forever, each row once per epoch. Fewer rows than `BATCH` form one batch."""
    size = min(BATCH, items)
    while True:
        order = torch.randperm(items, generator=generator)
        yield from order[: items - items % size].split(size)


def _mlp(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
