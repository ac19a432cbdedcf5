"""Defines `CoOccurrence`, an item-to-item model that counts which items follow which, without training.

A history scores item j by the sum over its events i of `recency^age(i) * C[i, j] / (n_i + 1)^source_power`,
divided by `(n_j + 1)^target_power`. `C[i, j]` sums `distance^-distance_power` over all training pairs in
which j is at most `WINDOW` events after i (directed), or after or before it (symmetric). `n` counts the
training events of an item, and the newest event of a history has age 0. Items without any such pair come
last, by popularity.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding_bag

from recsys.data.convert.column_block import flat_indices
from recsys.evaluation.interactions import Interactions

WINDOW = 20
"""Number of events after an event that count as its neighbors."""

MOST_PAIRS = 2**26
"""Most training pairs in memory at once (about 1.5 GB); of a larger log, only every n-th row is counted."""

MOST_DENSE = 2**12 + 2**11
"""Most items of a catalogue whose matrix is dense, with up to 150 MB of float32."""

_SMALLEST_WEIGHT = 0.01
"""Smallest recency weight; events of a history with a smaller weight are left out."""

_MOST_EVENTS = 50
"""Most events of a history that are used, the newest ones."""


class Settings(NamedTuple):
    """Settings of `CoOccurrence`; the module's docstring has the formula.

    Attributes:
        symmetric: also count the items before an event.
        distance_power: exponent by which the weight of a neighbor falls with its distance; 0 weights all
            neighbors equally.
        recency: weight of each event of a history, relative to the next event.
        source_power: exponent of the normalization by the popularity of the history's item.
        target_power: exponent of the normalization by the popularity of the recommended item.
    """

    symmetric: bool = False
    distance_power: float = 1.0
    recency: float = 0.6
    source_power: float = 0.5
    target_power: float = 0.0


class Neighbors:
    """The matrix C, dense for a small catalogue, else as lists of each item's neighbors with their weights.

    Args:
        train: the training histories.
        distance_power, symmetric: as in `Settings`.
    """

    def __init__(self, train: Interactions, *, distance_power: float, symmetric: bool):
        self._num_items = num_items = train.num_items
        step = -(-len(train.items) * WINDOW // MOST_PAIRS)
        source, target, distance = _pairs(train.select(slice(0, None, step)) if step > 1 else train)
        weight = (distance**-distance_power).astype(np.float32)
        key = source * num_items + target
        self._dense = None
        if num_items <= MOST_DENSE:
            dense = np.bincount(key, weights=weight, minlength=num_items**2).reshape(num_items, num_items)
            self._dense = torch.from_numpy((dense + dense.T if symmetric else dense).astype(np.float32))
            return
        if symmetric:
            key, weight = np.concatenate([key, target * num_items + source]), np.tile(weight, 2)
        order = key.argsort()
        key, weight = key[order], weight[order]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        self._weights = np.add.reduceat(weight, first, dtype=np.float64) if len(first) else weight
        self._items = key[first] % num_items
        self._starts = np.searchsorted(key[first] // num_items, np.arange(num_items + 1))

    def sums(self, items: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns the weighted sum of the rows of C that belong to the items of each list, float64 [B, V].

        Args:
            items: int64 [n], indices of items, list after list.
            weights: float64 [n].
            lengths: int64 [B], the length of each list; they add up to n.
        """
        if self._dense is not None:
            offsets = torch.from_numpy(np.cumsum(lengths) - lengths)
            factors = torch.from_numpy(weights.astype(np.float32))
            indices = torch.from_numpy(items)
            return embedding_bag(
                indices, self._dense, offsets, mode="sum", per_sample_weights=factors
            ).numpy()
        starts = self._starts[items]
        counts = self._starts[items + 1] - starts
        places = flat_indices(starts, counts)
        row = np.repeat(np.arange(len(lengths)), lengths)
        flat = np.repeat(row * self._num_items, counts) + self._items[places]
        values = self._weights[places] * np.repeat(weights, counts)
        total = np.bincount(flat, weights=values, minlength=len(lengths) * self._num_items)
        return total.reshape(len(lengths), self._num_items)


class Pairs(NamedTuple):
    """Pairs of different items of a history: index of the earlier item, of the later item, distance."""

    source: np.ndarray
    target: np.ndarray
    distance: np.ndarray


def _pairs(train: Interactions) -> Pairs:
    item, row, pairs = train.items - 1, train.rows, []
    for distance in range(1, WINDOW + 1):
        source, target = item[:-distance], item[distance:]
        valid = (row[:-distance] == row[distance:]) & (source != target) & (source >= 0) & (target >= 0)
        source, target = source[valid], target[valid]
        pairs.append(Pairs(source, target, np.full(len(source), distance, np.float32)))
    return Pairs(*map(np.concatenate, zip(*pairs, strict=True)))


class CoOccurrence:
    """Scores items for histories.

    Args:
        neighbors: the counts.
        popularity: int64 [V], training events of each item.
        settings: settings of the formula.
    """

    def __init__(self, neighbors: Neighbors, popularity: np.ndarray, settings: Settings):
        self._neighbors = neighbors
        self._recency = settings.recency
        self._source = (popularity + 1.0) ** -settings.source_power
        self._target = (popularity + 1.0) ** -settings.target_power
        # Small enough that it orders only items that no neighbor reaches.
        self._fallback = popularity * (1e-12 / max(1, popularity.max()))

    @classmethod
    def fit(cls, train: Interactions, settings: Settings) -> "CoOccurrence":
        """Counts the pairs of the training histories."""
        neighbors = Neighbors(train, distance_power=settings.distance_power, symmetric=settings.symmetric)
        return cls(neighbors, popularity(train), settings)

    def scores(self, histories: Interactions) -> np.ndarray:
        """Scores the catalogue for each row, float64 [B, V]; column k is the item of table row k + 1."""
        return self.normalize(self.sums(histories))

    def sums(self, histories: Interactions) -> np.ndarray:
        """Computes the sums of the formula before normalization, float64 [B, V]."""
        rows = histories.rows
        age = np.cumsum(histories.lengths)[rows] - 1 - np.arange(len(rows))
        weight = self._recency**age
        kept = (age < _MOST_EVENTS) & (weight >= _SMALLEST_WEIGHT) & (histories.items > 0)
        item = histories.items[kept] - 1
        lengths = np.bincount(rows[kept], minlength=len(histories.lengths))
        return self._neighbors.sums(item, weight[kept] * self._source[item], lengths)

    def normalize(self, sums: np.ndarray) -> np.ndarray:
        """Divides `sums` by the popularity of the recommended items, which gives scores."""
        return sums * self._target + self._fallback


class Popularity:
    """Scores items by their number of training events, the same for every history."""

    def __init__(self, popularity: np.ndarray):
        self._popularity = popularity.astype(np.float64)

    def scores(self, histories: Interactions) -> np.ndarray:
        """Scores the catalogue for each row, float64 [B, V]; see `CoOccurrence.scores`."""
        return np.broadcast_to(self._popularity, (len(histories.lengths), len(self._popularity)))


def popularity(train: Interactions) -> np.ndarray:
    """Counts the training events of each item of the catalogue, int64 [V]."""
    return np.bincount(train.items, minlength=train.num_items + 1)[1:]
