"""From original values to rows of embedding tables, and back.

Three mappings, one a table: `Vocabulary` (ids counted in advance), `HashBuckets` and `Buckets` (numbers cut
by limits). `mappings` builds them for a resolved config. All work on whole arrays.
"""

from typing import NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys import files
from recsys import protos as pb
from recsys.data.arrow import is_text, one_array, open_parquet
from recsys.data.hashing import buckets, hash_text, mix
from recsys.data.row_order import RowOrder, dealt_out
from recsys.errors import DataError

_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""Texts that are an int64 in its shortest form."""

_REMEDY = "Make it with the preparation tool that made the event files."


class Vocabulary:
    """Ids of one table: row 0 stands for every id that is not in it, `order` says where the others lie."""

    def __init__(self, ids: pa.Array, *, name: str, table: str | None = None) -> None:
        """Prepares the search.

        Args:
            ids: int64 or string, each once, no nulls.
            name: what errors call it, usually its file.
            table: the table over whose rows they are dealt out; None if id i is row i + 1.

        Raises:
            DataError: nulls, duplicates, or ids of another type.
        """
        if pa.types.is_integer(ids.type) or pa.types.is_null(ids.type):
            ids = ids.cast(pa.int64())
        elif is_text(ids.type):
            ids = ids.cast(pa.large_string())
        else:
            raise DataError(f"{name}: `id` is {ids.type}; allowed are int64 and string. {_REMEDY}")
        if ids.null_count:
            raise DataError(f"{name}: `id` has {ids.null_count} nulls. {_REMEDY}")
        self.name = name
        self.ids = ids
        self.is_text = pa.types.is_large_string(ids.type)
        self._search = _search(hash_text(ids).view(np.int64) if self.is_text else ids.to_numpy(), ids, name)
        self.order = RowOrder(len(ids), table)
        # A look into an array costs a tenth of the arithmetic behind it.
        self._rows = np.append(0, self.order.rows(np.arange(len(ids)))) if table else None

    @classmethod
    def read(cls, path: str, size: int | None = None, *, table: str | None = None) -> "Vocabulary":
        """Reads the column `id` of a parquet file.

        Args:
            path: local path or fsspec address.
            size: number of ids that the config expects; None takes any.
            table: as the constructor's.

        Raises:
            DataError: a file that is missing, broken, or of another size.
        """
        column = _read_parquet(path)["id"]
        if size is not None and len(column) != size:
            raise DataError(
                f"{path}: it has {len(column)} ids, the config says {size} (vocabulary.size). "
                "Leave `size` out to take the file's, or use the vocabulary that the config was made for."
            )
        return cls(one_array(column), name=path, table=table)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> int:
        """Rows of the embedding table."""
        return len(self.ids) + 1

    def map(self, values: pa.Array) -> np.ndarray:
        """Rows of the table, int64, of original ids; 0 for an id that is not in the vocabulary.

        Args:
            values: integers or strings, as the vocabulary's, without nulls.
        """
        listed = self._find(values)
        return listed if self._rows is None else self._rows[listed]

    def original(self, rows: np.ndarray) -> pa.Array:
        """Original ids of table rows; null for row 0."""
        places = self.order.places(rows)
        return self.ids.take(pa.array(places, mask=places < 0))

    def _find(self, values: pa.Array) -> np.ndarray:
        """1 + the place of each id in the vocabulary, 0 for an id that is not in it."""
        if not self.is_text:
            return self._search.find(_int64(values))
        unique, inverse = _unique_text(values)
        found = self._search.find(hash_text(unique).view(np.int64))
        if len(self.ids):
            # Another text may have the same hash as one in the vocabulary.
            same = pc.equal(self.ids.take(pa.array(np.maximum(found - 1, 0))), unique)
            found = np.where(same.to_numpy(zero_copy_only=False), found, 0)
        return found[inverse]


class HashBuckets:
    """Rows by a fixed hash of the id; two ids may share one. 7 and "7" are one id: CSV files have texts."""

    def __init__(self, rows: int) -> None:
        if not 1 <= rows <= 2**32:
            raise ValueError(f"hash.num_buckets is {rows}; it must be at least 1 and at most {2**32}")
        self.rows = rows

    def map(self, values: pa.Array) -> np.ndarray:
        """Rows of the table, int64, of integers or strings without nulls."""
        if pa.types.is_integer(values.type):
            return buckets(mix(_int64(values)), self.rows)
        unique, inverse = _unique_text(values)
        hashes = hash_text(unique)
        numbers = np.flatnonzero(pc.match_substring_regex(unique, _INTEGER).to_numpy(zero_copy_only=False))
        hashes[numbers] = mix(_int64(unique.take(pa.array(numbers)).cast(pa.int64())))
        return buckets(hashes, self.rows)[inverse]


class Buckets:
    """Row i of a number x with boundaries[i-1] <= x < boundaries[i]."""

    def __init__(self, boundaries: list[float]) -> None:
        self.boundaries = np.asarray(boundaries, np.float64)
        self.rows = len(boundaries) + 1

    def map(self, values: np.ndarray) -> np.ndarray:
        """Rows of the table, int64, of finite numbers."""
        return np.searchsorted(self.boundaries, values, side="right")


def normalize(values: np.ndarray, config: pb.Normalize) -> np.ndarray:
    """(f(x) - mean) / std in float64, given back as float32; f is the identity or sign(x) log(1 + |x|)."""
    if config.log1p:
        values = np.sign(values) * np.log1p(np.abs(values))
    return ((values - config.mean) / config.std).astype(np.float32)


def mappings(pipeline: pb.Pipeline) -> dict[str, Vocabulary | HashBuckets | Buckets]:
    """The mapping of every table of a resolved config; vocabulary files are read here.

    Raises:
        DataError: a vocabulary that cannot be used.
    """
    found: dict[str, Vocabulary | HashBuckets | Buckets] = {}
    for feature in pipeline.features:
        table = feature.id.table if feature.HasField("id") else feature.name
        if table in found:
            continue
        if feature.HasField("id") and feature.id.HasField("vocabulary"):
            vocabulary = feature.id.vocabulary
            order = dealt_out(pipeline, table)
            found[table] = Vocabulary.read(vocabulary.file, vocabulary.size, table=order)
        elif feature.HasField("id"):
            found[table] = HashBuckets(feature.id.hash.num_buckets)
        elif feature.numeric.HasField("bucketize"):
            found[feature.name] = Buckets(list(feature.numeric.bucketize.boundaries))
    return found


def id_type(path: str) -> pa.DataType:
    """int64 or string: the type of a vocabulary file's ids, from its footer.

    Raises:
        DataError: as `Vocabulary.read`.
    """
    return _schema(path).field("id").type


def fingerprints(pipeline: pb.Pipeline) -> dict[str, str]:
    """Of each table the SHA-256 of its vocabulary file and how its ids lie in it: with other ids, or in
    another order, weights mean nothing.

    Raises:
        DataError: a file that cannot be read.
    """
    found: dict[str, str] = {}
    for feature in pipeline.features:
        if feature.HasField("id") and feature.id.HasField("vocabulary") and feature.id.table not in found:
            path = feature.id.vocabulary.file
            try:
                with fsspec.open(path, "rb") as file:
                    digest = files.sha256(file)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error}). {_REMEDY}") from error
            order = "dealt out " if dealt_out(pipeline, feature.id.table) else ""
            found[feature.id.table] = order + digest
    return found


class _Sorted:
    """Binary search over all keys, with a table in front that knows most of the frequent ones at one look.

    Keys come most frequent first, and queries repeat them as often: the search is left with the rare ones.
    """

    def __init__(self, keys: np.ndarray, order: np.ndarray) -> None:
        self._keys = keys
        self._order = order
        self._sorted = keys[order]
        self._bits = min(_FRONT_BITS, max(1, int(4 * len(keys)).bit_length()))
        self._front = np.zeros(1 << self._bits, np.int32)
        # Written backwards: where two keys share a place, the more frequent one stays.
        self._front[self._slots(keys[::-1])] = np.arange(len(keys))[::-1]

    def find(self, queries: np.ndarray) -> np.ndarray:
        if len(self._keys) == 0:
            return np.zeros(len(queries), np.int64)
        rows = self._front[self._slots(queries)].astype(np.int64)
        rest = np.flatnonzero(self._keys[rows] != queries)
        rows += 1
        if len(rest):
            # Sorted queries walk through the keys once, instead of jumping about in a large array.
            unique, inverse = np.unique(queries[rest], return_inverse=True)
            place = np.minimum(np.searchsorted(self._sorted, unique), len(self._keys) - 1)
            rows[rest] = np.where(self._sorted[place] == unique, self._order[place] + 1, 0)[inverse]
        return rows

    def _slots(self, keys: np.ndarray) -> np.ndarray:
        # Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): one product spreads well enough.
        return ((keys.view(np.uint64) * _GOLDEN) >> np.uint64(64 - self._bits)).view(np.int64)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FRONT_BITS = 22
"""Most places of the table in front, as a power of 2: 16 MiB."""


class _Dense(NamedTuple):
    """Rows by id - lowest; for ids that are numbered nearly without gaps."""

    lowest: int
    rows: np.ndarray

    def find(self, queries: np.ndarray) -> np.ndarray:
        inside = (queries >= self.lowest) & (queries < self.lowest + len(self.rows))
        return self.rows[np.where(inside, queries - self.lowest, 0)] * inside


_DENSE_FACTOR = 4


def _search(keys: np.ndarray, ids: pa.Array, name: str) -> _Sorted | _Dense:
    if len(keys) and pa.types.is_integer(ids.type):
        lowest, highest = int(keys.min()), int(keys.max())
        if highest - lowest < _DENSE_FACTOR * len(keys):
            rows = np.zeros(highest - lowest + 1, np.int64)
            rows[keys - lowest] = np.arange(1, len(keys) + 1)
            if np.count_nonzero(rows) == len(keys):
                return _Dense(lowest, rows)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        first, second = (ids[int(order[twice[0] + i])].as_py() for i in (0, 1))
        raise DataError(
            f"{name}: ids {first!r} and {second!r} are the same, or the same to the hash. {_REMEDY}"
        )
    return _Sorted(keys, order)


def _unique_text(values: pa.Array) -> tuple[pa.Array, np.ndarray]:
    encoded = values.cast(pa.large_string()).dictionary_encode()
    return encoded.dictionary, encoded.indices.to_numpy()


def _int64(values: pa.Array) -> np.ndarray:
    return values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def _schema(path: str) -> pa.Schema:
    with _open(path) as file:
        return file.schema_arrow


def _read_parquet(path: str) -> pa.Table:
    with _open(path) as file:
        try:
            return file.read(columns=["id"])
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path}: cannot be read ({error}). {_REMEDY}") from error


def _open(path: str) -> pq.ParquetFile:
    if not path:
        raise DataError(
            "a vocabulary has no file. Set data.vocabulary_dir, or `vocabulary { file: ... }` of the feature."
        )
    try:
        file = open_parquet(path, _REMEDY)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such vocabulary file. {_REMEDY}") from error
    if "id" not in file.schema_arrow.names:
        raise DataError(
            f"{path}: it has no column `id`, only {', '.join(file.schema_arrow.names)}. {_REMEDY}"
        )
    return file
