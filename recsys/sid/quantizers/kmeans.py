"""k-means with a k-means++ start, restarts of empty clusters, and an option that balances clusters.

scikit-learn and faiss have no balanced assignment. One Lloyd loop for both forms keeps results comparable.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.sid.quantizers.base import nearest

ITERATIONS = 25
SINKHORN_ITERATIONS = 50
SINKHORN_TEMPERATURE = 0.05
"""Temperature of Sinkhorn, relative to the mean squared distance of vectors and centroids. Smaller values are
closer to a hard assignment."""


class Clusters(NamedTuple):
    """Centroids [V, d] and the centroid of each vector, int64 [items]."""

    centroids: Tensor
    assigned: Tensor


def kmeans(
    vectors: Tensor,
    size: int,
    generator: torch.Generator,
    *,
    balanced: bool = False,
    iterations: int = ITERATIONS,
) -> Clusters:
    """Clusters vectors [items, d].

    Args:
        vectors: float32 or float64.
        size: V, number of clusters.
        generator: generator of the initial centroids.
        balanced: whether to assign by Sinkhorn instead of the nearest centroid.
        iterations: number of assignments, each followed by an update of the means.
    """
    centroids = plus_plus(vectors, size, generator)
    assigned = torch.zeros(len(vectors), dtype=torch.long)
    for _ in range(iterations):
        assigned = sinkhorn_assignment(vectors, centroids) if balanced else nearest(vectors, centroids)
        centroids = means(vectors, assigned, centroids)
    assigned = sinkhorn_assignment(vectors, centroids) if balanced else nearest(vectors, centroids)
    return Clusters(centroids, assigned)


def plus_plus(vectors: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Chooses centroids among the vectors, one after the other, by greedy k-means++.

    For each centroid, a few candidates are drawn in proportion to their squared distance from the nearest
    centroid so far. The candidate that leaves the smallest sum of squared distances is chosen (Arthur and
    Vassilvitskii, "k-means++", 2007).
    """
    trials = 2 + int(math.log(size))
    chosen = torch.randint(len(vectors), (1,), generator=generator)
    distance = (vectors - vectors[chosen[0]]).square().sum(1)
    for _ in range(size - 1):
        # With fewer distinct vectors than centroids, some centroids repeat, and their clusters stay empty.
        weights = (distance if distance.sum() > 0 else torch.ones_like(distance)).double().cumsum(0)
        drawn = torch.rand(trials, generator=generator, dtype=torch.float64) * weights[-1]
        candidates = torch.searchsorted(weights, drawn).clamp(max=len(vectors) - 1)
        remaining = torch.minimum(distance, squared_distances(vectors[candidates], vectors))
        best = remaining.sum(1).argmin()
        chosen, distance = torch.cat([chosen, candidates[best, None]]), remaining[best]
    return vectors[chosen]


def squared_distances(first: Tensor, second: Tensor) -> Tensor:
    """Computes the squared distance of each row of `first` from each row of `second`."""
    products = first @ second.T
    return (first.square().sum(1, keepdim=True) - 2 * products + second.square().sum(1)).clamp(min=0)


def means(vectors: Tensor, assigned: Tensor, centroids: Tensor) -> Tensor:
    """Returns the mean of each cluster; empty clusters restart at vectors far from their centroid."""
    counts = torch.bincount(assigned, minlength=len(centroids))
    sums = torch.zeros_like(centroids).index_add_(0, assigned, vectors)
    moved = sums / counts.clamp(min=1)[:, None]
    empty = torch.nonzero(counts == 0)[:, 0]
    if len(empty):
        far = (vectors - centroids[assigned]).square().sum(1).topk(min(len(empty), len(vectors))).indices
        moved[empty[: len(far)]] = vectors[far]
    return moved


def sinkhorn_assignment(vectors: Tensor, centroids: Tensor) -> Tensor:
    """Assigns each vector to the centroid with the largest share of its transport plan."""
    return sinkhorn(squared_distances(vectors, centroids)).argmax(1)


def sinkhorn(costs: Tensor, iterations: int = SINKHORN_ITERATIONS) -> Tensor:
    """Computes the plan of entropic optimal transport between uniform marginals, [items, V].

    Rows sum to 1/items, columns nearly to 1/V. Source: Cuturi, "Sinkhorn distances", 2013.

    Args:
        costs: [items, V], float32 or float64.
        iterations: number of iterations, each of which scales columns, then rows.
    """
    items, size = costs.shape
    # Subtracting a constant from a row does not change the plan, and keeps the row's largest entry at 1.
    costs = costs - costs.min(1, keepdim=True).values
    tiny = torch.finfo(costs.dtype).tiny
    plan = torch.exp(-costs / (SINKHORN_TEMPERATURE * costs.mean()).clamp(min=tiny))
    rows = costs.new_full((items,), 1.0 / items)
    columns = costs.new_ones(size)
    for _ in range(iterations):
        columns = 1.0 / (size * (rows @ plan)).clamp(min=tiny)
        rows = 1.0 / (items * (plan @ columns)).clamp(min=tiny)
    return rows[:, None] * plan * columns
