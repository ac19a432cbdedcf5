"""Reads CSV files with lists as delimited text, for small logs and for viewing rows in an editor.

A CSV file has no row groups and no types, so each reader process parses a whole file at once. Types come from
the config: ids of a vocabulary have the type of the vocabulary, ids of a hash feature are text, times and
actions are integers.
"""

import hashlib
from collections.abc import Callable

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from recsys import protos as pb
from recsys.config.feature_kinds import Values
from recsys.config.registry import register
from recsys.data.lru import Lru
from recsys.data.schema.contract import FileColumn, file_columns, key_columns
from recsys.data.sources.base import File, Source, find_files
from recsys.errors import DataError

_ROWS = 1024
"""Rows per row group."""

_PARSED_FILES = 4
"""Number of parsed files that a process keeps in memory."""


@register(pb.CsvSource)
class CsvSource(Source):
    """A source of CSV files, whose row groups are runs of 1024 rows.

    An empty field is an empty list in a column of lists, an empty text (which no vocabulary has) in a column
    of texts, and a null in any other column. In a key column, an empty field is always a null.

    Args:
        config: delimiters.
        types: types of the columns that the config may read, by name.
        keys: names of the key columns.
    """

    def __init__(self, config: pb.CsvSource, types: dict[str, pa.DataType], keys: list[str]) -> None:
        self.files = []
        self._config = config
        self._types = types
        self._keys = keys
        self._parsed: Lru[pa.Table] = Lru(_PARSED_FILES)

    @classmethod
    def open(cls, config: pb.CsvSource, *, pipeline: pb.Pipeline) -> "CsvSource":
        """Parses every file once.

        Raises:
            DataError: there is no file, or a file cannot be parsed.
        """
        source = cls(config, _types(pipeline), key_columns(pipeline))
        source.files = [source._describe(path) for path in find_files(list(config.paths), ".csv")]
        return source

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_parsed": Lru(_PARSED_FILES)}

    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        """Reads a row group; see `Source.read`."""
        listed = self.files[file]
        return (
            self._parsed.get(file, lambda: self._reparse(listed))
            .select(columns)
            .slice(row_group * _ROWS, _ROWS)
        )

    def _describe(self, path: str) -> File:
        content = _content(path)
        table = self._parse(path, content)
        rows = [min(_ROWS, table.num_rows - first) for first in range(0, table.num_rows, _ROWS)]
        return File(path, len(content), _hash(content), tuple(rows), table.schema)

    def _reparse(self, listed: File) -> pa.Table:
        content = _content(listed.path)
        if _hash(content) != listed.fingerprint:
            raise DataError(f"{listed.path}: it changed while it was read. Start again once it is complete.")
        return self._parse(listed.path, content)

    def _parse(self, path: str, content: bytes) -> pa.Table:
        try:
            texts = pacsv.read_csv(
                pa.BufferReader(content),
                read_options=pacsv.ReadOptions(use_threads=False),
                parse_options=pacsv.ParseOptions(delimiter=self._config.delimiter),
                convert_options=pacsv.ConvertOptions(
                    column_types={name: pa.string() for name in self._types},
                    strings_can_be_null=True,
                    null_values=[""],
                ),
            )
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{path}: cannot be parsed ({error}). Check csv.delimiter and the number of fields."
            ) from error
        columns = [self._column(path, name, texts.column(i)) for i, name in enumerate(texts.column_names)]
        return pa.Table.from_arrays(columns, names=texts.column_names)

    def _column(self, path: str, name: str, text: pa.ChunkedArray) -> pa.Array:
        wanted = self._types.get(name)
        array = pa.concat_arrays(text.chunks) if text.num_chunks else pa.array([], text.type)
        if wanted is None:
            return array
        if wanted == pa.string() and name not in self._keys:
            return pc.fill_null(array, "")
        if not pa.types.is_list(wanted):
            return _cast(array, wanted, lambda place: f"{path}, row {place}: {name}")
        lists = pc.split_pattern(pc.fill_null(array, ""), self._config.list_delimiter)
        # Splitting an empty text gives one empty text.
        lists = pc.if_else(pc.equal(pc.fill_null(array, ""), ""), pa.scalar([], lists.type), lists)
        rows = pc.list_parent_indices(lists)
        values = _cast(
            lists.flatten(), wanted.value_type, lambda place: f"{path}, row {rows[place].as_py()}: {name}"
        )
        return pa.ListArray.from_arrays(lists.offsets, values)


def _types(pipeline: pb.Pipeline) -> dict[str, pa.DataType]:
    """Returns the type of every column that the config may read; pyarrow infers the types of key columns."""
    types = {}
    for mode in ("evaluate", "train"):
        for column in file_columns(pipeline, mode):
            if column.depth > 1:
                raise DataError(
                    f"column {column.name} has lists in lists, which a CSV file cannot hold. Use parquet."
                )
            value = _value_type(column)
            types[column.name] = pa.list_(value) if column.depth else value
    # pyarrow infers the type of key columns from their texts, unless the config makes them text.
    return {
        name: kind for name, kind in types.items() if name not in key_columns(pipeline) or kind == pa.string()
    }


def _value_type(column: FileColumn) -> pa.DataType:
    if Values.TEXT in column.values:
        return pa.string()
    return pa.float64() if Values.REAL in column.values else pa.int64()


def _cast(values: pa.Array, wanted: pa.DataType, where: Callable[[int], str]) -> pa.Array:
    try:
        return values.cast(wanted)
    except pa.ArrowInvalid:
        place = next(i for i in range(len(values)) if not _parses(values.slice(i, 1), wanted))
        raise DataError(f"{where(place)} is {values[place].as_py()!r}; it must be {wanted}.") from None


def _parses(value: pa.Array, wanted: pa.DataType) -> bool:
    try:
        value.cast(wanted)
    except pa.ArrowInvalid:
        return False
    return True


def _content(path: str) -> bytes:
    try:
        with fsspec.open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
