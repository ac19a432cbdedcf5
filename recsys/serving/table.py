"""Makes a table of the rows of requests, as if it had been read from a file."""

from typing import Any

import pyarrow as pa

from recsys import protos as pb
from recsys.config.feature_kinds import Values
from recsys.data.schema.contract import FileColumn, file_columns


class TableMaker:
    """Makes tables of the columns that a package reads.

    Args:
        pipeline: resolved config of the package.
    """

    def __init__(self, pipeline: pb.Pipeline) -> None:
        self._kinds = {column.name: _stored(column) for column in file_columns(pipeline, "predict")}

    def table(self, columns: dict[str, list[Any]]) -> pa.Table:
        """Returns a table of columns of validated rows, each with a value per row."""
        return pa.table({name: _array(values, self._kinds[name]) for name, values in columns.items()})


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError):
        # Hashed ids may be integers in one row and texts in the next; 7 and "7" are the same id.
        if kind is not None:
            raise
        return pa.array([_as_text(value) for value in values])


def _stored(column: FileColumn) -> pa.DataType | None:
    """Returns the type of a column in a table; None for hashed ids, which are texts or integers."""
    if column.values == Values.ID:
        return None
    types = {Values.TEXT: pa.large_string(), Values.INTEGER: pa.int64()}
    kind = types.get(column.values, pa.float64())
    for _ in range(column.depth):
        kind = pa.list_(kind)
    return kind


def _as_text(value: Any) -> Any:
    """Returns ids, within any lists, as texts."""
    return [_as_text(inner) for inner in value] if isinstance(value, list) else str(value)
