"""Reads delimited text: tables with a header, checked against the columns and kinds of values they must have.

Errors name the file, the line and the column. Files may end in .gz.
"""

import csv
import difflib
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import polars as pl
import pyarrow as pa
import pyarrow.csv

from recsys.data.arrow import first_line
from recsys.errors import DataError, shortened
from recsys.files import sha256

MOST_NAMES = 40
"""Most columns that an error lists; a file with more was probably read with a wrong delimiter."""

UNREADABLE = (OSError, EOFError, zlib.error)
"""Errors that reading a file raises if it is cut off or damaged, compressed or not."""

INTEGER, NUMBER, TEXT = "an integer", "a number", "text"
"""Kinds of columns that `typed` converts, in the words of its messages."""


def find_files(folder: Path, pattern: str, content: str) -> list[Path]:
    """Lists the files below `folder` that match `pattern`, in the order of their names.

    Raises:
        DataError: the folder does not exist, or has no such file.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files = sorted(folder.rglob(pattern), key=lambda path: (path.name, str(path)))
    if not files:
        raise DataError(f"{folder}: no file {pattern} ({content}) in it or below it")
    return files


def fingerprints(files: list[Path]) -> list[dict[str, str | int]]:
    """Describes the files that data was made from: name, size in bytes and SHA-256 of each."""
    return [{"name": p.name, "bytes": p.stat().st_size, "sha256": sha256(p)} for p in files]


def check_columns(wanted: list[str], present: list[str], where: str, hint: str = "") -> None:
    """Checks that a file has each wanted column exactly once.

    Args:
        wanted: names of the wanted columns.
        present: the columns of the file.
        where: name of the file in errors.
        hint: last sentence of the error about a missing column.

    Raises:
        DataError: a wanted column is missing or occurs twice; the message suggests the nearest names.
    """
    if not present:
        raise DataError(f"{where}: the file is empty; its first line must name the columns")
    for name in wanted:
        if present.count(name) > 1:
            raise DataError(f"{where}: {present.count(name)} columns are called {name}; rename all but one")
    missing = []
    for name in wanted:
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            missing.append(name + (f" (did you mean {_visible(near[0])}?)" if near else ""))
    if missing:
        shown = ", ".join(name if len(name) < 80 else shortened(name) for name in present[:MOST_NAMES])
        more = f" and {len(present) - MOST_NAMES} more" if len(present) > MOST_NAMES else ""
        raise DataError(f"{where}: no column {', '.join(missing)}; it has {shown}{more}{hint}")


def _visible(name: str) -> str:
    """Returns a name, in quotes if blanks around it would be overlooked."""
    return name if name == name.strip() else repr(name)


def text_batches(
    open_file: Callable[[], BinaryIO],
    where: str,
    columns: list[str],
    delimiter: str = ",",
    block_bytes: int = 1 << 24,
    *,
    can_change_delimiter: bool = False,
    optional: Sequence[str] = (),
) -> Iterator[tuple[int, pl.DataFrame]]:
    """Reads a CSV file with a header piece by piece; yields each piece's first line number and text columns.

    Args:
        open_file: opens the file at its beginning; called for each pass over it.
        where: name of the file in errors.
        columns: names of the columns to read.
        delimiter: delimiter between values.
        block_bytes: size of a piece in bytes; no line may be longer.
        can_change_delimiter: True if the tool has a flag --delimiter, which errors may name.
        optional: names of further columns, which are read if the file has them.

    Raises:
        DataError: a column is missing, a line has too many or too few values, or the file cannot be read.
    """
    try:
        with open_file() as file:
            header = _header(file, where, delimiter)
        columns = [*columns, *(name for name in optional if name in header)]
        hint = _delimiter_hint(columns, header, delimiter) if can_change_delimiter else ""
        check_columns(columns, header, where, hint)
        with open_file() as file:
            yield from _parsed(file, columns, delimiter, block_bytes)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        fault = _bad_line(open_file, where, delimiter)
        raise DataError(fault or f"{where}: {first_line(error)[:300]}") from error
    except UNREADABLE as error:
        raise DataError(f"{where} cannot be read: {error}; is it complete?") from error


def _parsed(
    file: BinaryIO, columns: list[str], delimiter: str, block_bytes: int
) -> Iterator[tuple[int, pl.DataFrame]]:
    """Parses an open file: yields the first line number and the text columns of each piece."""
    reader = pa.csv.open_csv(
        file,
        read_options=pa.csv.ReadOptions(block_size=block_bytes),
        parse_options=pa.csv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
        convert_options=pa.csv.ConvertOptions(
            include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
        ),
    )
    line = 2
    previous = pl.DataFrame()
    for batch in reader:
        if previous.height:
            yield line, previous
            line += previous.height
        previous = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([batch])))
    # Blank lines after the last event are not events; anywhere else they are a mistake.
    if (filled := _filled(previous)).any():
        yield line, previous.head(filled.arg_true()[-1] + 1)


def read_csv(path: Path, kinds: Mapping[str, str]) -> pl.DataFrame:
    """Reads a whole CSV file with the columns of `kinds`; errors as in `text_batches` and `typed`."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return read_csv_stream(lambda: _open(path), str(path), kinds)


def read_csv_stream(open_file: Callable[[], BinaryIO], where: str, kinds: Mapping[str, str]) -> pl.DataFrame:
    """Reads a whole CSV file, as `read_csv` does, that `open_file` opens and that errors call `where`."""
    pieces = [typed(piece, kinds, where, line) for line, piece in text_batches(open_file, where, list(kinds))]
    if not pieces:
        raise DataError(f"{where}: no rows after the header")
    return pl.concat(pieces)


def typed(
    texts: pl.DataFrame, kinds: Mapping[str, str], where: str, first_line: int, *, word: str = "line"
) -> pl.DataFrame:
    """Converts text columns to INTEGER (int64), NUMBER (finite float64) or TEXT (unchanged).

    Args:
        texts: columns of strings.
        kinds: the kind of each column to keep.
        where: name of the file in errors.
        first_line: line of row 0.
        word: word for a line in errors.

    Raises:
        DataError: a value is not an integer or a number; names its line.
    """
    columns = []
    for name, kind in kinds.items():
        column = texts[name]
        if kind != TEXT:
            trimmed = column.str.strip_chars()
            column = trimmed.cast(pl.Int64 if kind == INTEGER else pl.Float64, strict=False)
            usable = column.is_not_null() if kind == INTEGER else column.is_finite().fill_null(False)
            bad = (~usable).arg_true()
            if len(bad):
                value = texts[name][bad[0]]
                raise DataError(
                    f"{where}, {word} {first_line + bad[0]}: {name} is {shortened(value)}, expected {kind}"
                )
        columns.append(column.alias(name))
    return pl.DataFrame(columns)


def id_column(texts: pl.Series) -> pl.Series:
    """Converts ids to int64 if each is a whole number >= 0 in its shortest form; else they stay text."""
    numbers = texts.cast(pl.Int64, strict=False)
    if is_integer_text(texts):
        return numbers
    return texts.fill_null("")


def is_integer_text(texts: pl.Series) -> bool:
    """Returns whether each text is a whole number >= 0 in its shortest form, which int64 preserves."""
    numbers = texts.cast(pl.Int64, strict=False)
    return bool(((numbers >= 0) & (numbers.cast(pl.String) == texts)).fill_null(False).all())


def _filled(texts: pl.DataFrame) -> pl.Series:
    """Returns True for each row with any text, else False."""
    return texts.select(pl.any_horizontal(pl.all() != "")).to_series() if texts.width else pl.Series([False])


def _header(file: BinaryIO, where: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader(_lines(file), delimiter=delimiter), [])
    except csv.Error as error:
        raise DataError(f"{where}, line 1: {error}; its first line must name the columns") from error


def _delimiter_hint(columns: list[str], header: list[str], delimiter: str) -> str:
    """Returns a hint about the delimiter with which the header has all columns, if there is one."""
    line = delimiter.join(header)
    for name, separator in {",": ",", ";": ";", "tab": "\t", "|": "|"}.items():
        if separator != delimiter and set(columns) <= {value.strip('" ') for value in line.split(separator)}:
            return f". It has all of them with --delimiter '{name}'"
    return ""


def _bad_line(open_file: Callable[[], BinaryIO], where: str, delimiter: str) -> str:
    """Describes the first line whose number of values differs from the header's; "" if there is none."""
    expected = None
    try:
        with open_file() as file:
            reader = csv.reader(_lines(file), delimiter=delimiter)
            for row in reader:
                expected = expected or len(row)
                if len(row) != expected:
                    return f"{where}, line {reader.line_num}: {len(row)} values, the header has {expected}"
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return f"{where}, line {reader.line_num + 1}: byte {byte:#04x} is not UTF-8; convert the file to it"
    except csv.Error as error:
        return f"{where}, line {reader.line_num}: {error}"
    except UNREADABLE:
        return ""
    return ""


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yields the lines of a file as text; a line ends with LF, CR LF, or CR alone."""
    for block in file:
        for line in block.splitlines(keepends=True):
            yield line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8")


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
