"""Converts rows that a user passes, in any supported form, to a pyarrow table."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from recsys.data.arrow import first_line
from recsys.errors import DataError

Rows: TypeAlias = Any
"""A pandas or polars DataFrame, a pyarrow Table or RecordBatch, any other object that has the method
`__arrow_c_stream__`, or a mapping from column names to values."""


def to_table(rows: Rows, name: str = "rows") -> pa.Table:
    """Converts rows to a table with types that the data path reads.

    Args:
        rows: see `Rows`.
        name: name of the rows in errors.

    Raises:
        DataError: the rows have an unsupported type, or a column holds values of several types.
    """
    try:
        return _plain(_table(rows, name))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{name}: cannot be read as a table ({first_line(error)}). Give each column values of one type."
        ) from error


def _table(rows: Rows, name: str) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if hasattr(rows, "__arrow_c_stream__"):
        return pa.table(rows)
    if type(rows).__module__.partition(".")[0] == "pandas" and hasattr(rows, "columns"):
        # pandas before 2.2 has no `__arrow_c_stream__`.
        return pa.Table.from_pandas(rows, preserve_index=False)
    if isinstance(rows, Mapping):
        return pa.table(dict(rows))
    raise DataError(
        f"{name}: {type(rows).__name__} is given; give a pandas or polars DataFrame, a pyarrow Table, or a "
        "dict with a list for each column"
    )


def _plain(table: pa.Table) -> pa.Table:
    """Converts view types, which newer versions of polars export, to plain strings and lists."""
    plain = pa.schema([(field.name, _plain_type(field.type)) for field in table.schema])
    return table.cast(plain) if plain != table.schema.remove_metadata() else table.replace_schema_metadata()


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    return pa.large_string() if pa.types.is_string_view(kind) else kind
