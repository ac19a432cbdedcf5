"""Measures of codes: how evenly they are used, how many items share them, what they keep of vectors."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recsys.sid.quantizers.base import Quantizer

NEIGHBOURS = 10
MOST_QUERIES = 2000
"""Most items whose neighbors are looked up; of more items, every n-th one is taken."""

_ROWS = 256


@dataclass(frozen=True)
class Level:
    """Statistics of the use of one level's codes.

    Attributes:
        entropy: entropy of the distribution of items over codes, in bits.
        perplexity: 2^entropy, the number of evenly used codes that would have the same entropy.
        dead: number of codes without an item.
        largest: number of items of the most frequent code.
    """

    entropy: float
    perplexity: float
    dead: int
    largest: int


@dataclass(frozen=True)
class CodeStatistics:
    """Statistics of codes before and after the extra digit.

    Attributes:
        items: number of items.
        distinct: number of distinct codes divided by the number of items.
        alone: share of items whose code no other item has.
        unique: the same share with the extra digit.
        shared: number of codes that several items share.
        largest: number of items of the most shared code.
        levels: statistics of each level.
    """

    items: int
    distinct: float
    alone: float
    unique: float
    shared: int
    largest: int
    levels: list[Level]


@dataclass(frozen=True)
class Kept:
    """Measures of how much of the vectors that they were fitted on codes keep.

    Attributes:
        items: number of items that the codes were fitted on.
        error: squared distance of vectors and decoded vectors, divided by the squared length of the vectors.
        neighbours: share of the 10 nearest neighbours by cosine that have the same first code, the same first
            two, ...; for unordered codes one number, the share of equal codes.
        chance: the same for any two items.
        recall: share of the 10 nearest neighbours that are also among those of the decoded vectors.
    """

    items: int
    error: float
    neighbours: list[float]
    chance: list[float]
    recall: float


def code_statistics(codes: np.ndarray, digits: np.ndarray, size: int) -> CodeStatistics:
    """Computes statistics of codes [items, levels] of 0 to `size` - 1 and their extra digits [items]."""
    counts = np.unique(codes, axis=0, return_counts=True)[1]
    full_counts = np.unique(np.column_stack([codes, digits]), axis=0, return_counts=True)[1]
    levels = [_level(np.bincount(codes[:, place], minlength=size)) for place in range(codes.shape[1])]
    items = len(codes)
    return CodeStatistics(
        items=items,
        distinct=len(counts) / items,
        alone=float((counts == 1).sum() / items),
        unique=float((full_counts == 1).sum() / items),
        shared=int((counts > 1).sum()),
        largest=int(counts.max()),
        levels=levels,
    )


def _level(counts: np.ndarray) -> Level:
    share = counts[counts > 0] / counts.sum()
    entropy = float(-(share * np.log2(share)).sum())
    return Level(entropy, 2.0**entropy, int((counts == 0).sum()), int(counts.max()))


def bucket_sizes(codes: np.ndarray) -> np.ndarray:
    """Returns the number of items with the same codes as each item, itself included: int64 [items]."""
    _, groups, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    return counts[groups.reshape(-1)]


def kept(vectors: Tensor, codes: Tensor, quantizer: Quantizer, *, ordered: bool) -> Kept:
    """Compares vectors [items, D] with the vectors that their codes [items, levels] decode to."""
    decoded = quantizer.decode(codes)
    error = float((decoded - vectors).double().square().sum() / vectors.double().square().sum())
    queries = torch.arange(0, len(vectors), -(-len(vectors) // MOST_QUERIES))
    near, near_decoded = _neighbours(vectors, queries), _neighbours(decoded, queries)
    same_code = codes[queries][:, None] == codes[near]
    agree = (same_code.cumprod(2) if ordered else same_code).double().mean((0, 1))
    chance = _chance(codes, ordered=ordered)
    both = (near[:, :, None] == near_decoded[:, None, :]).any(2).double().mean()
    values = agree.tolist() if ordered else [float(agree.mean())]
    return Kept(len(vectors), error, values, chance, float(both))


def _chance(codes: Tensor, *, ordered: bool) -> list[float]:
    """Returns the share of pairs of different items that agree in the first l codes, for each l.

    For unordered codes it is one number: the mean over levels of the share that agrees in the level.
    """
    items, levels = codes.shape
    parts = [codes[:, 0 if ordered else place : place + 1] for place in range(levels)]
    counts = [torch.unique(part, dim=0, return_counts=True)[1] for part in parts]
    pairs = [float((n * (n - 1)).sum()) for n in counts]
    shares = [count / max(items * (items - 1), 1) for count in pairs]
    return shares if ordered else [sum(shares) / levels]


def _neighbours(vectors: Tensor, queries: Tensor) -> Tensor:
    """Returns the `NEIGHBOURS` nearest rows by cosine, without the query itself: int64 [queries, k]."""

    unit = torch.nn.functional.normalize(vectors, dim=1)
    neighbours = []
    for rows in queries.split(_ROWS):
        scores = unit[rows] @ unit.T
        scores[torch.arange(len(rows)), rows] = -torch.inf
        neighbours.append(scores.topk(min(NEIGHBOURS, len(vectors) - 1), dim=1).indices)
    return torch.cat(neighbours)
