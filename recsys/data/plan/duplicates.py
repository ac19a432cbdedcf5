"""Finds rows of a split that repeat the key and request time of an earlier row, in any row group or file.

The search runs once, when the split is opened, and reads only the key and time columns. Rows are compared by
a 64-bit hash; only rows whose hash occurs more than once are compared by value. Rows are numbered
consecutively through all files of the source.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config import features
from recsys.data.hashing import buckets
from recsys.data.lru import Lru
from recsys.data.schema.row_keys import hash_keys, same_key
from recsys.data.sources import RowGroup, Source
from recsys.errors import DataError

_HASHES = 1 << 25
"""Most hashes in memory at a time (256 MiB); a source with more rows is read several times."""

_TABLES = 16
"""Number of row groups whose keys are kept in memory for comparisons."""

MANY = 1000
"""Stop counting duplicates here."""

_NO_ROW = -1


class Duplicates(NamedTuple):
    """The repeated rows of a source.

    Attributes:
        rows: int64 [n], ascending, numbered through all files.
        firsts: int64 [n], the earlier row that each repeated row repeats.
        ends: int64 [files], number of rows up to the end of each file.
        paths: addresses of the files.
    """

    rows: np.ndarray
    firsts: np.ndarray
    ends: np.ndarray
    paths: list[str]

    def of_table(self, file: int, first_row: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds the repeated rows in a table that has `num_rows` rows of a file, starting at row `first_row`.

        Returns:
            Row numbers within the table, int64 [n], and their indices in `rows`, int64 [n].
        """
        start = first_row + (int(self.ends[file - 1]) if file else 0)
        low, high = np.searchsorted(self.rows, [start, start + num_rows])
        return self.rows[low:high] - start, np.arange(low, high)

    def first(self, place: int) -> str:
        """Names the earlier row that rows[place] repeats, as `FILE, row ROW`."""
        return self.name(int(self.firsts[place]))

    def name(self, row: int) -> str:
        """Names a row that is numbered through all files, as `FILE, row ROW`."""
        file = int(np.searchsorted(self.ends, row, side="right"))
        return f"{self.paths[file]}, row {row - (int(self.ends[file - 1]) if file else 0)}"


def find_duplicates(source: Source, pipeline: pb.Pipeline) -> Duplicates | None:
    """Finds the rows that repeat the key columns and request time of an earlier row.

    Returns:
        The repeated rows, or None if there is nothing to search: the config names no key, rows are synthetic,
        or `data.find_duplicates` is off.

    Raises:
        DataError: a row is repeated and bad rows may not be left out, more rows are repeated than may be left
            out, or a file is broken.
    """
    data = pipeline.data
    if not data.key_columns or not data.find_duplicates or source.unique_keys:
        return None
    skip = data.bad_rows.policy == pb.BadRows.SKIP
    names = list(dict.fromkeys([*data.key_columns, features.REQUEST_TIME]))
    search = _Search(source, names, limit=data.bad_rows.limit + 1 if skip else 1)
    duplicates = search.run()
    if len(duplicates.rows) == search.limit:
        row = int(duplicates.rows[0])
        problem = f"{duplicates.name(row)}: {same_key(search.key(row))} as {duplicates.first(0)}."
        if not skip:
            raise DataError(
                f"{problem} Correct the files, or leave such rows out and count them: "
                "data.bad_rows { policy: SKIP }."
            )
        raise DataError(
            f"{problem} More than data.bad_rows.limit = {data.bad_rows.limit} rows repeat another one. "
            "Correct the files, raise the limit, or name all columns that identify a row in data.key_columns."
        )
    return duplicates


def count_repeated(source: Source, names: list[str]) -> int:
    """Counts the rows that repeat an earlier row's values in the columns `names`; stops at MANY.

    Raises:
        DataError: a file is broken.
    """
    return 0 if source.unique_keys else len(_Search(source, names, MANY).run().rows)


class _Search:
    """Finds the first `limit` rows of a source that repeat an earlier row's values in the columns `names`."""

    def __init__(self, source: Source, names: list[str], limit: int) -> None:
        self.limit = limit
        # A copy, so that the files that it opens are closed when it is garbage-collected.
        self._source = copy.copy(source)
        self._names = names
        self._groups = source.row_groups
        self._starts = np.cumsum([0, *(group.num_rows for group in self._groups)], dtype=np.int64)
        self._tables: Lru[pa.Table] = Lru(_TABLES)

    def run(self) -> Duplicates:
        """Searches one part of the hashes at a time, so that the hashes of a part fit into memory."""
        num_parts = -(-int(self._starts[-1]) // _HASHES)
        pairs = sorted(pair for part in range(num_parts) for pair in self._search_part(part, num_parts))
        pairs = np.asarray(pairs[: self.limit], np.int64).reshape(-1, 2)
        ends = np.cumsum([sum(file.rows) for file in self._source.files], dtype=np.int64)
        return Duplicates(pairs[:, 0], pairs[:, 1], ends, [file.path for file in self._source.files])

    def key(self, row: int) -> dict:
        """Reads the key of a row, as a dict from column to value."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        table = self._tables.get(group, lambda: self._read(self._groups[group]))
        return table.slice(row - int(self._starts[group]), 1).to_pylist()[0]

    def _search_part(self, part: int, num_parts: int) -> list[tuple[int, int]]:
        """Finds the first repeated rows in one part of all hashes, as pairs (row, earlier row)."""
        twice = self._hashes_that_come_twice(part, num_parts)
        first = np.full(len(twice), _NO_ROW)
        further_firsts: dict[int, list[int]] = {}
        pairs: list[tuple[int, int]] = []
        if not len(twice):
            return pairs
        for rows, hashes in self._rows(part, num_parts):
            places = np.minimum(np.searchsorted(twice, hashes), len(twice) - 1)
            is_repeated = twice[places] == hashes
            rows, places = rows[is_repeated], places[is_repeated]
            new = first[places] == _NO_ROW
            fresh, at = np.unique(places[new], return_index=True)
            first[fresh] = rows[new][at]
            again = first[places] != rows
            for row, place in zip(rows[again].tolist(), places[again].tolist(), strict=True):
                # Different keys with the same hash each have a first row.
                firsts = [int(first[place]), *further_firsts.get(place, ())]
                key = self.key(row)
                repeated = next((candidate for candidate in firsts if self.key(candidate) == key), None)
                if repeated is None:
                    further_firsts.setdefault(place, []).append(row)
                    continue
                pairs.append((row, repeated))
                if len(pairs) == self.limit:
                    return pairs
        return pairs

    def _hashes_that_come_twice(self, part: int, num_parts: int) -> np.ndarray:
        """Returns the hashes of one part that occur more than once, uint64, ascending."""
        # Parts have nearly equal sizes unless a few keys fill very many rows, which `_fold` reduces to one
        # hash each.
        expected = int(1.02 * self._starts[-1] / num_parts) + 1
        hash_buffer, filled = np.empty(expected, np.uint64), 0
        twice = np.empty(0, np.uint64)
        for _, hashes in self._rows(part, num_parts):
            if filled + len(hashes) > len(hash_buffer):
                once, again = _fold(hash_buffer[:filled])
                twice, filled = np.union1d(twice, again), len(once)
                capacity = max(expected, int(1.2 * filled)) + len(hashes)
                hash_buffer = np.concatenate([once, np.empty(capacity - filled, np.uint64)])
            hash_buffer[filled : filled + len(hashes)] = hashes
            filled += len(hashes)
        return np.union1d(twice, _fold(hash_buffer[:filled])[1])

    def _rows(self, part: int, num_parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields, for each row group, the rows whose hash is in the given part, and their hashes."""
        for group, start in zip(self._groups, self._starts.tolist(), strict=False):
            hashes, rows = hash_keys(self._read(group))
            if num_parts > 1:
                rows = rows[buckets(hashes[rows], num_parts) == part]
            yield rows + start, hashes[rows]

    def _read(self, group: RowGroup) -> pa.Table:
        return self._source.read(group.file, group.number, self._names)


def _fold(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct hashes and the repeated hashes, both ascending. Sorts `hashes` in place."""
    hashes.sort()
    new = np.ones(len(hashes), bool)
    new[1:] = hashes[1:] != hashes[:-1]
    return hashes[new], np.unique(hashes[~new])
