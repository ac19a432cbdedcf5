"""Maps original values to rows of embedding tables, and back.

Most tables have one of three mappings: `Vocabulary` (ids counted in advance), `HashBuckets` (hashed ids) or
`Buckets` (numbers between boundaries). `mappings` reads them for a resolved config. All of them map whole
arrays. A kind of feature of another package may have a mapping of its own, or none.
"""

from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys import files
from recsys import protos as pb
from recsys.config.feature_kinds import FeatureKind, Values, kinds
from recsys.data.arrow import is_text, one_array, open_parquet
from recsys.data.hashing import AT_A_TIME, buckets, hash_text, mix
from recsys.data.schema.id_search import REMEDY, build_search
from recsys.data.schema.row_layout import ShardedRowLayout, sharded_name
from recsys.errors import DataError

_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"
"""Matches texts that are an integer of at most 18 digits in its shortest form, which int64 holds."""


_FEW = 256
"""Most ids that are looked up one by one in a dictionary, which for few of them is ten times faster."""

_KEPT = 1 << 16
"""Most ids in that dictionary."""

_DEALT_OUT = "dealt out "
"""Begins the fingerprint of a vocabulary whose ids are spread over sharded rows. Checkpoints store it."""


class Vocabulary:
    """The ids of one embedding table and their rows; row 0 stands for every id that is not in the vocabulary.

    Attributes:
        name: name of the vocabulary in errors, usually its file.
        ids: int64 or large_string, the most frequent first.
        is_text: True if ids are strings.
        layout: maps indices into `ids` to table rows.
    """

    def __init__(self, ids: pa.Array, *, name: str, table: str | None = None) -> None:
        """Prepares the search.

        Args:
            ids: integers or strings, each once, no nulls.
            name: name of the vocabulary in errors, usually its file.
            table: name of the table if its rows are sharded; None if id i has row i + 1.

        Raises:
            DataError: there are nulls, duplicates, or ids of another type.
        """
        if pa.types.is_integer(ids.type) or pa.types.is_null(ids.type):
            try:
                ids = ids.cast(pa.int64())
            except pa.ArrowInvalid as error:
                raise DataError(f"{name}: an `id` does not fit int64 ({error}). {REMEDY}") from error
        elif is_text(ids.type):
            ids = ids.cast(pa.large_string())
        else:
            raise DataError(f"{name}: `id` is {ids.type}; allowed are integers and strings. {REMEDY}")
        if ids.null_count:
            raise DataError(f"{name}: `id` has {ids.null_count} nulls. {REMEDY}")
        self.name = name
        self.ids = ids
        self.is_text = pa.types.is_large_string(ids.type)
        self.layout = ShardedRowLayout(len(ids), table)
        self._looked_up: dict[int | str, int] = {}
        places = np.arange(len(ids))
        # The search for a text gives 1 + its index in `ids`, because the text there has to be compared.
        self._rows = np.append(0, self.layout.row_of(places)).astype(row_type(self.rows))
        if self.is_text:
            self._search = build_search(hash_text(ids).view(np.int64), ids, name, np.append(0, 1 + places))
        else:
            self._search = build_search(ids.to_numpy(), ids, name, self._rows)

    @classmethod
    def read(cls, path: str, size: int | None = None, *, table: str | None = None) -> "Vocabulary":
        """Reads the column `id` of a parquet file.

        Args:
            path: local path or fsspec address.
            size: number of ids that the config expects; None accepts any number.
            table: as for the constructor.

        Raises:
            DataError: the file is missing, broken, or has another number of ids.
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
        """Number of rows of the embedding table."""
        return len(self.ids) + 1

    def map(self, values: pa.Array, dtype: npt.DTypeLike = np.int64) -> np.ndarray:
        """Maps original ids to table rows, 0 for an id that is not in the vocabulary.

        Args:
            values: integers or strings, as in the vocabulary, without nulls.
            dtype: integer type of the rows, at least as large as `row_type`.
        """
        if len(values) > _FEW:
            return self._find(values, dtype)
        ids = values.to_pylist() if self.is_text else _int64(values).tolist()
        kept = self._looked_up
        new = [value for value in ids if value not in kept]
        if new:
            if len(kept) + len(new) > _KEPT:
                # A new one, since another thread may be looking ids up in the old one.
                self._looked_up = kept = {}
                new = ids
            kept.update(zip(new, self._find(pa.array(new, self.ids.type), dtype).tolist(), strict=True))
        return np.array([kept[value] for value in ids], dtype)

    def original(self, rows: np.ndarray) -> pa.Array:
        """Maps table rows to original ids, null for row 0."""
        places = self.layout.id_of(rows)
        return self.ids.take(pa.array(places, mask=places < 0))

    def _find(self, values: pa.Array, dtype: npt.DTypeLike) -> np.ndarray:
        """Maps ids to table rows by the search, which suits many ids."""
        if not self.is_text:
            return self._search.find(_int64(values), dtype)
        unique, inverse = _unique_text(values)
        places = self._search.find(hash_text(unique).view(np.int64), np.int64)
        if len(self.ids):
            # A text that is not in the vocabulary may have the same hash as one that is.
            is_same_text = pc.equal(self.ids.take(pa.array(np.maximum(places - 1, 0))), unique)
            places = np.where(is_same_text.to_numpy(zero_copy_only=False), places, 0)
        return self._rows[places[inverse]].astype(dtype, copy=False)


class HashBuckets:
    """Maps ids to rows by a fixed hash; two ids may share a row.

    7 and "7" are the same id, because CSV files have only texts.
    """

    def __init__(self, rows: int) -> None:
        if not 1 <= rows <= 2**32:
            raise ValueError(f"hash.num_buckets is {rows}; it must be at least 1 and at most {2**32}")
        self.rows = rows

    def map(self, values: pa.Array, dtype: npt.DTypeLike = np.int64) -> np.ndarray:
        """Maps integers or strings without nulls to table rows of type `dtype`."""
        if pa.types.is_integer(values.type):
            numbers = _int64(values)
            rows = np.empty(len(numbers), dtype)
            for start in range(0, len(numbers), AT_A_TIME):
                piece = slice(start, start + AT_A_TIME)
                rows[piece] = buckets(mix(numbers[piece]), self.rows)
            return rows
        unique, inverse = _unique_text(values)
        hashes = hash_text(unique)
        numbers = np.flatnonzero(pc.match_substring_regex(unique, _INTEGER).to_numpy(zero_copy_only=False))
        hashes[numbers] = mix(_int64(unique.take(pa.array(numbers)).cast(pa.int64())))
        return buckets(hashes, self.rows)[inverse].astype(dtype, copy=False)


class Buckets:
    """Maps a number x to the row i for which boundaries[i-1] <= x < boundaries[i]."""

    def __init__(self, boundaries: list[float]) -> None:
        self.boundaries = np.asarray(boundaries, np.float64)
        self.rows = len(boundaries) + 1

    def map(self, values: np.ndarray, dtype: npt.DTypeLike = np.int64) -> np.ndarray:
        """Maps finite numbers to table rows of type `dtype`."""
        return np.searchsorted(self.boundaries, values, side="right").astype(dtype, copy=False)


def row_type(rows: int) -> type[np.integer]:
    """Returns int32 if it holds all row numbers of a table, else int64: the arrays are copied many times."""
    return np.int32 if rows <= 2**31 else np.int64


def normalize(values: np.ndarray, config: pb.Normalize) -> np.ndarray:
    """Computes (f(x) - mean) / std in float64 and returns float32; f is identity or sign(x) log(1 + |x|)."""
    scaled = np.empty(len(values), np.float32)
    for start in range(0, len(values), AT_A_TIME):
        piece = slice(start, start + AT_A_TIME)
        numbers = values[piece].astype(np.float64)
        if config.log1p:
            np.copysign(np.log1p(np.abs(numbers)), numbers, out=numbers)
        numbers -= config.mean
        numbers /= config.std
        scaled[piece] = numbers
    return scaled


def mappings(pipeline: pb.Pipeline) -> dict[str, Any]:
    """Builds the mapping of every embedding table of a resolved config, which reads the vocabulary files.

    Raises:
        DataError: a vocabulary cannot be used.
    """
    return {table: mapping_of(pipeline, kind) for table, kind in embedded_features(pipeline).items()}


def embedded_features(pipeline: pb.Pipeline) -> dict[str, FeatureKind]:
    """Returns the kind of the first feature of each embedding table of a resolved config, by the table's
    name."""
    by_table: dict[str, FeatureKind] = {}
    for kind in kinds(pipeline):
        if kind.table is not None:
            by_table.setdefault(kind.table, kind)
    return by_table


def mapping_of(pipeline: pb.Pipeline, kind: FeatureKind, file: str | None = None) -> Any:
    """Builds the mapping of the embedding table of a feature of a resolved config.

    Args:
        pipeline: the config, whose placement decides how ids are laid out over rows.
        kind: the feature.
        file: file of the vocabulary; None takes the one that the feature names.

    Raises:
        DataError: the vocabulary cannot be used.
    """
    vocabulary = kind.vocabulary
    if vocabulary is None:
        return kind.mapping()
    name = sharded_name(pipeline, kind.table or "")
    return Vocabulary.read(file or vocabulary.file, vocabulary.size, table=name)


def id_values(vocabulary: pb.Vocabulary) -> Values:
    """Returns the type of a vocabulary's ids, which is read from the footer of its file.

    Raises:
        DataError: the file is missing or broken.
    """
    return Values.TEXT if is_text(id_type(vocabulary.file)) else Values.INTEGER


def id_type(path: str) -> pa.DataType:
    """Reads the type of a vocabulary file's ids from its footer: an integer or string type.

    Raises:
        DataError: the file is missing or broken.
    """
    kind = _schema(path).field("id").type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def fingerprints(pipeline: pb.Pipeline) -> dict[str, str]:
    """Returns the SHA-256 of each table's vocabulary file, and whether its ids are spread over sharded rows.

    Weights are useless with a vocabulary that has other ids, or ids in other rows, than in training.

    Raises:
        DataError: a file cannot be read.
    """
    digests: dict[str, str] = {}
    for table, kind in embedded_features(pipeline).items():
        if kind.vocabulary is not None:
            path = kind.vocabulary.file
            try:
                with fsspec.open(path, "rb") as file:
                    digest = files.sha256(file)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error}). {REMEDY}") from error
            layout = _DEALT_OUT if sharded_name(pipeline, table) else ""
            digests[table] = layout + digest
    return digests


def digest_of(fingerprint: str) -> str:
    """Returns the SHA-256 of the vocabulary file in one of the `fingerprints`."""
    return fingerprint.removeprefix(_DEALT_OUT)


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
            raise DataError(f"{path}: cannot be read ({error}). {REMEDY}") from error


def _open(path: str) -> pq.ParquetFile:
    if not path:
        raise DataError(
            "a vocabulary has no file. Set data.vocabulary_dir, or `vocabulary { file: ... }` of the feature."
        )
    try:
        file = open_parquet(path, REMEDY)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such vocabulary file. {REMEDY}") from error
    if "id" not in file.schema_arrow.names:
        raise DataError(f"{path}: it has no column `id`, only {', '.join(file.schema_arrow.names)}. {REMEDY}")
    return file
