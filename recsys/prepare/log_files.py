"""Reads the files of a log: finds them, and yields their events as text.

A file is delimited text with a header (.csv, .tsv, also .gz) or parquet.
"""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.data.arrow import first_line, is_list, is_text
from recsys.errors import DataError
from recsys.prepare.log_columns import LogColumns, Piece
from recsys.prepare.text_tables import check_columns, text_batches

ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")

MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def find_logs(source: Path) -> list[Path]:
    """Returns the files of a log: `source` itself, or the text and parquet files in this folder.

    Raises:
        DataError: there is no such file.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder")
    files = sorted(path for path in source.iterdir() if path.is_file() and path.name.endswith(ENDINGS))
    if not files:
        raise DataError(f"{source}: no file that ends in {', '.join(ENDINGS)}")
    return files


def read_log(
    path: Path, columns: LogColumns, *, names: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> Iterator[Piece]:
    """Yields the columns of one file as text, about 100,000 lines at a time.

    Args:
        path: the file.
        columns: meaning of the file's columns, and its delimiter.
        names: the columns to read; by default all of `columns`.
        optional: further columns, which are read if the file has them.

    Raises:
        DataError: a column is missing, or the file cannot be read.
    """
    names = columns.all() if names is None else list(names)
    if path.suffix == ".parquet":
        yield from _read_parquet(path, columns, names, optional)
        return
    delimiter = columns.delimiter or ("\t" if ".tsv" in path.suffixes else ",")
    pieces = text_batches(
        lambda: gzip.open(path) if path.suffix == ".gz" else open(path, "rb"),
        str(path),
        names,
        delimiter=delimiter,
        can_change_delimiter=True,
        optional=optional,
    )
    for line, texts in pieces:
        yield Piece(texts, str(path), line, "line", columns.time_unit)


def _read_parquet(
    path: Path, columns: LogColumns, names: list[str], optional: Sequence[str]
) -> Iterator[Piece]:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = [*names, *(name for name in optional if name in file.schema_arrow.names)]
        check_columns(names, file.schema_arrow.names, str(path))
        row = 0
        for batch in file.iter_batches(1 << 17, columns=names):
            # Text that is no UTF-8 would end the process in polars.
            batch.validate(full=True)
            table = pa.Table.from_batches([batch])
            delimiters = dict.fromkeys(columns.lists, columns.list_delimiter)
            frame = pl.DataFrame(
                [_as_text(table[name], name, path, row, delimiters.get(name)) for name in names]
            )
            is_moment = columns.time in names and pa.types.is_temporal(table.schema.field(columns.time).type)
            yield Piece(frame, str(path), row, "row", "us" if is_moment else columns.time_unit)
            row += frame.height
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as parquet: {first_line(error)}") from error


def _as_text(
    column: pa.ChunkedArray, name: str, path: Path, first_row: int, delimiter: str | None
) -> pl.Series:
    """Converts a column to text: times to microseconds since 1970, nulls to "".

    With a delimiter, cells may be lists of texts or integers, which are joined by it.
    """
    kind = column.type
    if delimiter is not None and is_list(kind):
        if is_text(kind.value_type) or pa.types.is_integer(kind.value_type):
            return _joined(column, name, path, first_row, delimiter)
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
        kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        column = _microseconds(column, kind)
    elif pa.types.is_decimal256(kind):
        column = column.cast(pa.string())
    elif not (
        is_text(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    ):
        raise DataError(
            f"{path}: column {name} is {kind}; a log has one text, number, boolean, date or timestamp "
            "per cell. Write the column with such a type; lists of texts or integers are for --item-list and "
            "--user-list"
        )
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    return pl.Series(name, pl.from_arrow(column)).cast(pl.String).fill_null("")


def _joined(column: pa.ChunkedArray, name: str, path: Path, first_row: int, delimiter: str) -> pl.Series:
    """Writes each list as a text file has it; nulls are empty lists, and left out of lists."""
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    categories = pl.element().cast(pl.String).drop_nulls()
    lists = pl.Series(name, pl.from_arrow(column)).list.eval(categories)
    holds_delimiter = lists.list.eval(pl.element().str.contains(delimiter, literal=True)).list.any()
    places = holds_delimiter.fill_null(False).arg_true()
    if len(places):
        raise DataError(
            f"{path}, row {first_row + places[0]}: a category of {name} holds {delimiter!r}, which stands "
            "between categories; give --list-delimiter a text that none of them has"
        )
    return lists.list.join(delimiter).fill_null("")


def _microseconds(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_date(kind):
        column = column.cast(pa.timestamp("ms"))
        kind = column.type
    ticks = column.cast(pa.int64())
    if kind.unit == "ns":
        return pc.divide(ticks, 1000)
    return pc.multiply_checked(ticks, MICROSECONDS[kind.unit])
