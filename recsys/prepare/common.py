"""What the prepare_*.py tools share before rows exist: errors, delimited text, folders that appear whole.

`prepare_rows.py` continues from typed events to parquet, `prepare_config.py` writes the starter config.
"""

import argparse
import csv
import difflib
import gzip
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import polars as pl
import pyarrow as pa
import pyarrow.csv

from recsys.errors import ConfigError, DataError, RecsysError
from recsys.files import sha256
from recsys.flags import Parser, positive
from recsys.prepare.starter_config import train_command

INTEGER, NUMBER, TEXT = "an integer", "a number", "text"
"""Kinds of columns that `typed` knows, as they stand in its messages."""


def run(main: Callable[[list[str] | None], None], arguments: list[str] | None = None) -> int:
    """Calls a tool's `main`; an error meant for users becomes a message and exit code: 2 usage, 3 data."""
    try:
        main(arguments)
    except RecsysError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except OSError as error:
        # A full disk, a folder that may not be written: the system's word for it is what can be acted on.
        sys.stderr.write(f"error: {error}\n")
        return RecsysError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        return 130
    return 0


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags that every tool has."""
    made = Parser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--input", type=Path, required=True, help="where the original files are")
    made.add_argument("--output", type=Path, required=True, help="folder to make")
    made.add_argument("--overwrite", action="store_true", help="replace the output folder when it exists")
    made.add_argument("--rows-per-group", type=positive, default=1024, help="rows of a parquet row group")
    return made


def add_evaluation_history(made: argparse.ArgumentParser) -> None:
    """The flag of the tools that split by time."""
    made.add_argument(
        "--evaluation-history",
        choices=("frozen", "live"),
        default="frozen",
        help="histories of validation and test: up to the split's begin (default), or up to each request",
    )


def print_next(output: Path) -> None:
    """The last line of a tool: what to type next."""
    print(f"next: {train_command(output)}")


@contextmanager
def output_folder(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder to write into that becomes `target` at the end, or vanishes when the block fails.

    Raises:
        ConfigError: `target` has something in it and `overwrite` is off.
    """
    occupied = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if occupied and not overwrite:
        raise ConfigError(f"{target} exists; give another --output, or --overwrite to replace it")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file; --output must name a folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {target}: cannot be written: {error.strerror or error}") from error
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    retired = target.parent / f".{target.name}.old-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        if target.exists():
            target.rename(retired)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def find_files(folder: Path, pattern: str, what: str) -> list[Path]:
    """Files below `folder` that match, in the order of their names.

    Raises:
        DataError: no such folder, or no such file in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    found = sorted(folder.rglob(pattern), key=lambda path: (path.name, str(path)))
    if not found:
        raise DataError(f"{folder}: no file {pattern} ({what}) in it or below it")
    return found


def fingerprints(files: list[Path]) -> list[dict[str, str | int]]:
    """Name, bytes and SHA-256 of the files that data was made from."""
    return [{"name": p.name, "bytes": p.stat().st_size, "sha256": sha256(p)} for p in files]


def check_columns(wanted: list[str], present: list[str], where: str) -> None:
    """Raises: DataError: a wanted column is not there, or twice; names all with the nearest that are."""
    if not present:
        raise DataError(f"{where}: the file is empty; its first line must name the columns")
    for name in wanted:
        if present.count(name) > 1:
            raise DataError(f"{where}: {present.count(name)} columns are called {name}; rename all but one")
    missing = []
    for name in wanted:
        if name not in present:
            near = difflib.get_close_matches(name, present, n=1)
            missing.append(f"{name}" + (f" (did you mean {near[0]}?)" if near else ""))
    if missing:
        raise DataError(f"{where}: no column {', '.join(missing)}; it has {', '.join(present)}")


def text_batches(
    path: Path, columns: list[str], *, delimiter: str = ",", block_bytes: int = 1 << 24
) -> Iterator[tuple[int, pl.DataFrame]]:
    """Reads a CSV file (also .gz) with a header piece by piece: each one's first line and columns as text.

    Raises:
        DataError: no such file, a missing column, a line with too many or too few values.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with _open(path) as file:
        yield from _text_batches(file, str(path), columns, delimiter, block_bytes)


def read_csv(path: Path, kinds: Mapping[str, str]) -> pl.DataFrame:
    """A whole CSV file (also .gz) with the columns of `kinds`; errors as in `text_batches` and `typed`."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with _open(path) as file:
        return read_csv_stream(file, str(path), kinds)


def read_csv_stream(file: BinaryIO, where: str, kinds: Mapping[str, str]) -> pl.DataFrame:
    """`read_csv` of an open, seekable file, which errors call `where`."""
    pieces = [
        typed(piece, kinds, where, line)
        for line, piece in _text_batches(file, where, list(kinds), ",", 1 << 24)
    ]
    if not pieces:
        raise DataError(f"{where}: no rows behind the header")
    return pl.concat(pieces)


def typed(
    texts: pl.DataFrame, kinds: Mapping[str, str], where: str, first_line: int, *, word: str = "line"
) -> pl.DataFrame:
    """Text columns as INTEGER (int64), NUMBER (finite float64) or TEXT (as it is).

    Args:
        texts: columns of strings.
        kinds: the kind of each column to keep.
        where: what errors call the file.
        first_line: line of row 0.
        word: what errors call a line.

    Raises:
        DataError: a value that is no integer or number, with its line.
    """
    made = []
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
                    f"{where}, {word} {first_line + bad[0]}: {name} is {value!r}, expected {kind}"
                )
        made.append(column.alias(name))
    return pl.DataFrame(made)


def id_column(texts: pl.Series) -> pl.Series:
    """Ids as int64 when each is a whole number >= 0 in its shortest form, else as the text they are."""
    numbers = texts.cast(pl.Int64, strict=False)
    if is_integer_text(texts):
        return numbers
    return texts.fill_null("")


def is_integer_text(texts: pl.Series) -> bool:
    """Whether each text is a whole number >= 0 in its shortest form, which int64 gives back unchanged."""
    numbers = texts.cast(pl.Int64, strict=False)
    return bool(((numbers >= 0) & (numbers.cast(pl.String) == texts)).fill_null(False).all())


def _text_batches(
    file: BinaryIO, where: str, columns: list[str], delimiter: str, block_bytes: int
) -> Iterator[tuple[int, pl.DataFrame]]:
    try:
        header = next(csv.reader(_lines(file), delimiter=delimiter), [])
        check_columns(columns, header, where)
        file.seek(0)
        line = 2
        texts = dict.fromkeys(columns, pa.string())
        reader = pa.csv.open_csv(
            file,
            read_options=pa.csv.ReadOptions(block_size=block_bytes),
            parse_options=pa.csv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False),
            convert_options=pa.csv.ConvertOptions(include_columns=columns, column_types=texts),
        )
        held = pl.DataFrame()
        for batch in reader:
            if held.height:
                yield line, held
                line += held.height
            held = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([batch])))
        # Blank lines behind the last one are no events; anywhere else they are a mistake.
        if (filled := _filled(held)).any():
            yield line, held.head(filled.arg_true()[-1] + 1)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise DataError(_bad_line(file, where, delimiter) or f"{where}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{where} cannot be read: {error}; is it complete?") from error


def _filled(texts: pl.DataFrame) -> pl.Series:
    """Whether a row has any text."""
    return texts.select(pl.any_horizontal(pl.all() != "")).to_series() if texts.width else pl.Series([False])


def _bad_line(file: BinaryIO, where: str, delimiter: str) -> str:
    """Looks for the first line whose number of values is not the header's."""
    file.seek(0)
    reader = csv.reader(_lines(file), delimiter=delimiter)
    expected = None
    try:
        for row in reader:
            expected = expected or len(row)
            if len(row) != expected:
                return f"{where}, line {reader.line_num}: {len(row)} values, the header has {expected}"
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return f"{where}, line {reader.line_num + 1}: byte {byte:#04x} is not UTF-8; convert the file to it"
    return ""


def _lines(file: BinaryIO) -> Iterator[str]:
    for line in file:
        yield line.decode("utf-8-sig" if line.startswith(b"\xef\xbb\xbf") else "utf-8")


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")
