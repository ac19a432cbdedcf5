"""Makes a table of the rows of requests, as if it had been read from a file."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys import protos as pb
from recsys.config import features
from recsys.config.feature_kinds import Values
from recsys.data.arrow import integers, is_text, one_array, value_type
from recsys.data.schema.contract import FileColumn, file_columns


class TableMaker:
    """Makes tables of the columns that a package reads.

    Args:
        pipeline: resolved config of the package.
    """

    def __init__(self, pipeline: pb.Pipeline) -> None:
        self._columns = {column.name: column for column in file_columns(pipeline, "predict")}
        self._kinds = {name: _declared(column) for name, column in self._columns.items()}

    def table(self, columns: dict[str, list[Any]], streams: Sequence[bytes] = ()) -> pa.Table:
        """Returns a table of rows.

        Args:
            columns: columns of validated rows, each with a value per row; empty without such rows.
            streams: further rows, as streams of columns whose types suit the package.
        """
        tables = [pa.ipc.open_stream(stream).read_all() for stream in streams]
        if columns:
            arrays = {name: _array(values, self._kinds[name]) for name, values in columns.items()}
            tables.insert(0, pa.table(arrays))
        return tables[0] if len(tables) == 1 else self._joined(tables)

    def _joined(self, tables: list[pa.Table]) -> pa.Table:
        present = {name for table in tables for name in table.column_names}
        joined = {}
        for name, column in self._columns.items():
            if name in present:
                parts = [
                    table[name] if name in table.column_names else self._times(table) for table in tables
                ]
                joined[name] = _chained(parts, column)
        return pa.table(joined)

    def _times(self, table: pa.Table) -> pa.ChunkedArray:
        """Returns each request's time for its candidates: the default of the only optional column."""
        candidates = next(name for name in self._columns if name.startswith(features.PREFIX[pb.CANDIDATE]))
        lengths = integers(pc.list_value_length(one_array(table[candidates])))
        ends = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        times = np.repeat(integers(one_array(table[features.REQUEST_TIME])), lengths)
        return pa.chunked_array([pa.ListArray.from_arrays(ends, pa.array(times))])


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError):
        # Hashed ids may be integers in one row and texts in the next; 7 and "7" are the same id.
        if kind is not None:
            raise
        return pa.array([_as_text(value) for value in values])


def _chained(parts: list[pa.ChunkedArray], column: FileColumn) -> pa.ChunkedArray:
    """Joins parts of a column. Hashed ids become texts unless all of them are integers."""
    kinds = {part.type for part in parts}
    if len(kinds) > 1:
        texts = any(is_text(value_type(kind)) for kind in kinds)
        kind = _declared(column) or _listed(pa.large_string() if texts else pa.int64(), column.depth)
        # Integers in a column of numbers may be rounded, as they are in JSON and in files.
        parts = [part.cast(kind, safe=not pa.types.is_floating(value_type(kind))) for part in parts]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks])


def _declared(column: FileColumn) -> pa.DataType | None:
    """Returns the type of a column in a table; None for hashed ids, which are texts or integers."""
    if column.values == Values.ID:
        return None
    types = {Values.TEXT: pa.large_string(), Values.INTEGER: pa.int64()}
    return _listed(types.get(column.values, pa.float64()), column.depth)


def _listed(kind: pa.DataType, depth: int) -> pa.DataType:
    """Returns the type of lists of values."""
    for _ in range(depth):
        kind = pa.list_(kind)
    return kind


def _as_text(value: Any) -> Any:
    """Returns ids, within any lists, as texts."""
    return [_as_text(inner) for inner in value] if isinstance(value, list) else str(value)
