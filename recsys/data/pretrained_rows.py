"""Reads vectors of ids from parquet files, with which embedding tables begin a run."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys import protos as pb
from recsys.config.feature_kinds import FeatureKind
from recsys.data.arrow import is_list, is_text, open_parquet
from recsys.data.schema.vocabulary import Vocabulary, embedded_features, mapping_of
from recsys.errors import DataError

_AT_A_TIME = 65_536
"""Rows that are read at a time."""

_REMEDY = "Write it again, with one row per id."


class Vectors(NamedTuple):
    """Vectors of some rows of a table; `rows` int64 [n] without duplicates, `values` float32 [n, width]."""

    rows: np.ndarray
    values: np.ndarray


class PretrainedTable:
    """The vectors for one embedding table.

    Args:
        pipeline: the resolved config.
        table: name of the table.
        kind: the kind of a feature of the table; it has `id.init_from`.

    Raises:
        DataError: the file is missing or broken, a column is missing or has another type, or the vectors have
            another width than the table.

    Attributes:
        ids: ids in the file.
        used: rows of the table that got a vector.
        unknown: ids that are not in the vocabulary.
        shared: ids whose hash bucket got the vector of an earlier id of the file.
    """

    def __init__(self, pipeline: pb.Pipeline, table: str, kind: FeatureKind) -> None:
        self.table, self._pipeline, self._kind = table, pipeline, kind
        self._config, self._width = kind.feature.id.init_from, kind.width
        self.ids = self.used = self.unknown = self.shared = 0
        self._place = f"{self._config.parquet}: for table {table}"
        try:
            self._file: pq.ParquetFile = open_parquet(self._config.parquet, _REMEDY)
        except FileNotFoundError as error:
            raise DataError(f"{self._config.parquet}: no such file (init_from of table {table})") from error
        self._check_columns()

    def __iter__(self) -> Iterator[Vectors]:
        """Reads the file.

        Raises:
            DataError: an id or a vector is null, twice, of another width, or not finite; or no id is in the
                vocabulary.
        """
        mapping = mapping_of(self._pipeline, self._kind)
        taken = np.zeros(mapping.rows, bool)
        columns = [self._config.id_column, self._config.vector_column]
        for batch in self._file.iter_batches(_AT_A_TIME, columns=columns):
            ids, vectors = batch.column(columns[0]), self._values(batch.column(columns[1]))
            if ids.null_count:
                raise DataError(f"{self._place}: {columns[0]} has nulls between rows {self._span(batch)}")
            is_vocabulary = isinstance(mapping, Vocabulary)
            if is_vocabulary and mapping.is_text != is_text(ids.type):
                problem = f"{columns[0]} is {ids.type}, the ids of {mapping.name} are {mapping.ids.type}"
                raise DataError(f"{self._place}: {problem}; write ids of that type")
            rows = mapping.map(ids, np.int64)
            places = np.flatnonzero(rows) if is_vocabulary else np.arange(len(rows))
            self.unknown += len(rows) - len(places)
            unique, first = np.unique(rows[places], return_index=True)
            is_new = ~taken[unique]
            if is_vocabulary and (len(unique) < len(places) or not is_new.all()):
                again = sorted(set(range(len(places))) - set(first[is_new].tolist()))[0]
                raise DataError(f"{self._place}: id {ids[int(places[again])].as_py()!r} is there twice")
            rows, values = unique[is_new], vectors[places[first[is_new]]]
            self.shared += len(places) - len(rows)
            self._check_finite(values, ids, places[first[is_new]])
            taken[rows] = True
            self.ids, self.used = self.ids + len(batch), self.used + len(rows)
            yield Vectors(rows, values)
        if not self.used:
            raise DataError(f"{self._place}: none of its {self.ids:,} ids is in the vocabulary")

    def line(self) -> str:
        """Describes what was read, for the log."""
        unknown = f", {self.unknown:,} of its ids are not in the vocabulary" if self.unknown else ""
        shared = f", {self.shared:,} of its ids share a bucket with an earlier one" if self.shared else ""
        used = f"{self.used:,} rows begin with vectors of {self._config.parquet}"
        return f"table {self.table}: {used}{unknown}{shared}"

    def _check_columns(self) -> None:
        schema, config = self._file.schema_arrow, self._config
        for column in (config.id_column, config.vector_column):
            if schema.names.count(column) != 1:
                problem = f"it has not one column {column!r}, only {', '.join(schema.names)}"
                raise DataError(f"{self._place}: {problem}; set id_column and vector_column")
        ids, kind = schema.field(config.id_column).type, schema.field(config.vector_column).type
        if not (pa.types.is_integer(ids) or is_text(ids)):
            raise DataError(f"{self._place}: {config.id_column} is {ids}; allowed are integers and strings")
        if not is_list(kind) or not pa.types.is_floating(kind.value_type):
            problem = f"{config.vector_column} is {kind}; allowed are lists of floating-point numbers"
            raise DataError(f"{self._place}: {problem}")
        if pa.types.is_fixed_size_list(kind) and kind.list_size != self._width:
            raise self._wrong_width(kind.list_size)

    def _values(self, column: pa.Array) -> np.ndarray:
        if column.null_count:
            raise DataError(f"{self._place}: {self._config.vector_column} has nulls")
        if not pa.types.is_fixed_size_list(column.type):
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            if (lengths != self._width).any():
                raise self._wrong_width(int(lengths[lengths != self._width][0]))
        values = column.flatten()
        if values.null_count:
            raise DataError(f"{self._place}: a number in {self._config.vector_column} is null")
        return values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(column), self._width)

    def _wrong_width(self, width: int) -> DataError:
        problem = f"its vectors have {width} numbers, the table is {self._width} wide"
        return DataError(f"{self._place}: {problem}; make id.embedding_dim equal, or reduce the vectors")

    def _check_finite(self, values: np.ndarray, ids: pa.Array, places: np.ndarray) -> None:
        broken = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(broken):
            id = ids[int(places[broken[0]])].as_py()
            raise DataError(f"{self._place}: the vector of id {id!r} has a number that is not finite")

    def _span(self, batch: pa.RecordBatch) -> str:
        return f"{self.ids:,} and {self.ids + len(batch):,}"


def pretrained_tables(pipeline: pb.Pipeline) -> list[PretrainedTable]:
    """Opens the file of each table of a resolved config that has `init_from`, and checks its columns."""
    return [
        PretrainedTable(pipeline, table, kind)
        for table, kind in embedded_features(pipeline).items()
        if kind.feature.id.HasField("init_from")
    ]
