"""Finds the table rows of ids: by an array if ids have few gaps, else by hash tables and binary search."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from recsys.data.hashing import AT_A_TIME
from recsys.errors import DataError

REMEDY = "Make it with the preparation tool that made the event files."
"""The last sentence of errors about a vocabulary."""

_DENSE_FACTOR = 4
"""Largest range of ids, as a multiple of their number, for which an array is used."""


def build_search(keys: np.ndarray, ids: pa.Array, name: str, rows: np.ndarray) -> "SortedKeys | DenseIds":
    """Builds a search that maps keys[i] to rows[1 + i].

    Args:
        keys: int64, the ids or their hashes.
        ids: the ids themselves.
        name: name of the vocabulary in errors.
        rows: [1 + len(keys)], the row of unknown ids followed by the row of each key.

    Raises:
        DataError: two keys are equal.
    """
    if len(keys) and pa.types.is_integer(ids.type):
        lowest, highest = int(keys.min()), int(keys.max())
        if highest - lowest < _DENSE_FACTOR * len(keys):
            by_id = np.zeros(highest - lowest + 1, rows.dtype)
            by_id[keys - lowest] = rows[1:]
            if np.count_nonzero(by_id) == len(keys):
                return DenseIds(lowest, by_id)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        first, second = (ids[int(order[twice[0] + i])].as_py() for i in (0, 1))
        raise DataError(
            f"{name}: ids {first!r} and {second!r} are the same, or the same to the hash. {REMEDY}"
        )
    return SortedKeys(keys, order, rows)


class SortedKeys:
    """Binary search over all keys, behind two hash tables that answer nearly every query with one lookup.

    Keys come most frequent first. The second table holds keys that found no place in the first and is rarely
    needed; what remains for the binary search is mostly queries that are not keys at all.
    """

    def __init__(self, keys: np.ndarray, order: np.ndarray, rows: np.ndarray) -> None:
        self._sorted = keys[order]
        self._rows = rows[1:][order]
        self._fronts = []
        unplaced = np.arange(len(keys))
        for product in (_GOLDEN, _OTHER_PRODUCT):
            if len(unplaced):
                front = _Front.of(keys[unplaced], rows[1:][unplaced], product)
                self._fronts.append(front)
                unplaced = unplaced[front.look(keys[unplaced])[:, 0] != keys[unplaced]]

    def find(self, queries: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
        """Returns the row of each query, or 0 for a query that is not a key."""
        rows = np.zeros(len(queries), dtype)
        missing = []
        for start in range(0, len(queries), AT_A_TIME):
            missed = self._look(queries[start : start + AT_A_TIME], rows[start : start + AT_A_TIME])
            missing.append(missed + start)
        missing = np.concatenate([*missing, np.empty(0, np.int64)])
        if len(missing) and len(self._sorted):
            # Sorted queries pass through the keys once instead of jumping about in a large array.
            unique, inverse = np.unique(queries[missing], return_inverse=True)
            place = np.minimum(np.searchsorted(self._sorted, unique), len(self._sorted) - 1)
            rows[missing] = np.where(self._sorted[place] == unique, self._rows[place], 0)[inverse]
        return rows

    def _look(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Fills in the rows of queries that a hash table holds, and returns the indices of all others."""
        if not self._fronts:
            return np.empty(0, np.int64)
        first = self._fronts[0].look(queries)
        rows[:] = first[:, 1]
        missing = np.flatnonzero(first[:, 0] != queries)
        for front in self._fronts[1:]:
            second = front.look(queries[missing])
            rows[missing] = second[:, 1]
            missing = missing[second[:, 0] != queries[missing]]
        return missing


class _Front(NamedTuple):
    """A hash table of keys and their rows, which keeps only the first of the keys that share a place.

    A key and its row are adjacent in memory, so that a lookup waits for memory only once.
    """

    product: np.uint64
    shift: np.uint64
    entries: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray, rows: np.ndarray, product: np.uint64) -> "_Front":
        """Builds the table of at least one key, the more frequent first."""
        bits = min(_FRONT_BITS, int(2 * len(keys)).bit_length())
        front = cls(product, np.uint64(64 - bits), np.empty((1 << bits, 2), np.int64))
        # Empty places are filled with a key that never looks there.
        front.entries[:] = keys[0], rows[0]
        # Written in reverse order, so that the more frequent key overwrites the others.
        front.entries[front._places(keys[::-1])] = np.stack([keys, rows], 1)[::-1]
        return front

    def look(self, queries: np.ndarray) -> np.ndarray:
        """Returns the key stored at the place of each query, which may differ from the query, and its row,
        int64 [n, 2]."""
        return self.entries.take(self._places(queries), axis=0, mode="clip")

    def _places(self, keys: np.ndarray) -> np.ndarray:
        # Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): one product suffices.
        places = keys.view(np.uint64) * self.product
        places >>= self.shift
        return places.view(np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_OTHER_PRODUCT = np.uint64(0xD1342543DE82EF95)
"""Multiplier of the second table (Steele, Vigna: Computationally easy, spectrally good multipliers, 2021)."""

_FRONT_BITS = 21
"""Log2 of the largest number of places in a hash table, which then takes 32 MiB."""


class DenseIds(NamedTuple):
    """An array of rows, indexed by id - lowest id, for ids with few gaps."""

    lowest: int
    rows: np.ndarray

    def find(self, queries: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
        """Returns the row of each query, or 0 for a query that is not a key."""
        inside = (queries >= self.lowest) & (queries < self.lowest + len(self.rows))
        return (self.rows[np.where(inside, queries - self.lowest, 0)] * inside).astype(dtype, copy=False)
