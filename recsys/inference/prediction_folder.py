"""Keeps the files of a folder of predictions: parts, lists of bad rows, job and manifest.

part-FILE-GROUP.parquet           the answers of a row group, in the order of the input
_bad_rows/part-FILE-GROUP.jsonl   bad rows that were left out: kind, file, row and reason
_job.json                         package, settings and input that the parts belong to
_manifest.json                    rows, bad rows, input, size and SHA-256 of every part
_SUCCESS                          written last, after rows have been counted
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from recsys import files, typed_json
from recsys.data.arrow import first_line
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.row_checks import REASONS
from recsys.data.sources import RowGroup, Source
from recsys.errors import RecsysError
from recsys.inference.predictor import LEFT_OUT, Predictor

JOB, SUCCESS, INDEX, MANIFEST = "_job.json", "_SUCCESS", "_index.json", "_manifest.json"
BAD_ROWS, LOCK = "_bad_rows", ".lock"

JOB_PARTS = {
    "package": "package",
    "predict": "setting of `predict`",
    "key_columns": "data.key_columns",
    "input": "input",
}
"""Entries of the file JOB, with their names in errors."""


def part_path(output: Path, group: RowGroup) -> Path:
    """Returns the path of the part with the answers of a row group."""
    return output / f"part-{group.file:05d}-{group.number:05d}.parquet"


def bad_rows_path(output: Path, group: RowGroup) -> Path:
    """Returns the path of the list of a row group's bad rows, which exists if there are any."""
    return output / BAD_ROWS / f"{part_path(output, group).stem}.jsonl"


@dataclass
class PartEntry:
    """The entry of a part in the manifest.

    Attributes:
        part: file name of the part.
        rows: number of rows of the part, which is that of its row group.
        left_out: number of bad rows, whose answers are null.
        input: address of the input file.
        first_row: row of the input file at which the row group begins.
        bytes, sha256: size and hash of the part.
    """

    part: str
    rows: int
    left_out: int
    input: str
    first_row: int
    bytes: int
    sha256: str


def write_bad_rows(block: ColumnBlock, file: str, path: Path) -> None:
    """Writes a JSON line for each bad row of a block."""
    lines = [
        json.dumps(
            {
                "kind": REASONS[int(block.codes[place]) - 1],
                "file": file,
                "row": int(block.row[place]),
                "reason": sentence,
            },
            ensure_ascii=False,
        )
        for place, sentence in sorted(block.bad_rows.items())
    ]
    path.parent.mkdir(exist_ok=True)
    files.write_text(path, "\n".join(lines) + "\n")


def write_part(table: pa.Table, part: Path) -> None:
    """Writes a part beside its path and renames it, so that it exists as a whole or not at all."""
    aside = part.with_name(f".{part.name}.partial")
    pq.write_table(table, aside, compression="zstd", write_page_checksum=True)
    files.publish(aside, part)


def describe_part(source: Source, group: RowGroup, output: Path) -> PartEntry:
    """Checks and describes a part, for the manifest.

    Raises:
        RecsysError: the part is missing, damaged, or has more or fewer rows than its row group.
    """
    part = part_path(output, group)
    written = _read_footer(part)
    if written.rows != group.num_rows:
        raise RecsysError(f"{part}: it has {written.rows} rows, its input {group.num_rows}; remove it")
    return PartEntry(
        part=part.name,
        rows=written.rows,
        left_out=written.left_out,
        input=source.files[group.file].path,
        first_row=group.first_row,
        bytes=part.stat().st_size,
        sha256=files.sha256(part),
    )


def write_manifest(output: Path, entries: list[PartEntry]) -> None:
    """Writes the manifest and then `_SUCCESS`."""
    counts = {
        "rows": sum(entry.rows for entry in entries),
        "left_out": sum(entry.left_out for entry in entries),
    }
    parts = [asdict(entry) for entry in entries]
    files.write_text(output / MANIFEST, json.dumps({**counts, "parts": parts}, indent=1) + "\n")
    files.write_text(output / SUCCESS, json.dumps(counts) + "\n")


def require_ours(output: Path) -> None:
    """Raises RecsysError if the folder holds anything but predictions."""
    if output.exists() and not output.is_dir():
        raise RecsysError(f"{output} is a file, and predictions are a folder: give another --output")
    names = {path.name for path in output.iterdir()} if output.exists() else set()
    begun = JOB in names and any(name.startswith("part-") for name in names)
    # A job without a finished part leaves nothing that could be confused with another job.
    if not begun and any(not name.startswith(".part-") for name in names - {JOB, LOCK, BAD_ROWS}):
        raise RecsysError(f"{output} is not empty and holds no predictions: give another --output")


@contextmanager
def alone_in(output: Path, *, shared: bool = False) -> Iterator[None]:
    """Holds the lock of the folder, which is created if it is missing.

    Args:
        output: the folder.
        shared: whether other processes of the same prediction may hold the lock too.

    Raises:
        RecsysError: another prediction runs in the folder.
    """
    output.mkdir(parents=True, exist_ok=True)
    with files.locked(output / LOCK, shared=shared) as taken:
        if not taken:
            raise RecsysError(
                f"{output}: another process predicts into this folder; wait for it, end it, or give another "
                "--output"
            )
        yield


def note_job(predictor: Predictor, source: Source, output: Path) -> None:
    """Records package, settings and input in the folder; raises RecsysError on parts of another job."""
    weights = predictor.package.folder
    if weights is None:
        raise ValueError("files are predicted with a package or a checkpoint, whose manifest is recorded")
    job = {
        "package": files.sha256(weights / files.MANIFEST),
        "predict": str(predictor.settings).split("\n"),
        "key_columns": list(predictor.pipeline.data.key_columns),
        "input": [asdict(mark) for mark in source.marks()],
    }
    noted = output / JOB
    if not any(output.glob("part-*.parquet")):
        # Lists of bad rows without a part may belong to another job.
        shutil.rmtree(output / BAD_ROWS, ignore_errors=True)
        files.write_text(noted, json.dumps(job, indent=1) + "\n")
        return
    try:
        before = typed_json.parse(noted.read_bytes(), dict[str, Any])
    except (OSError, ValueError, TypeError) as error:
        raise RecsysError(
            f"{noted}: cannot be read ({error}), so it is unknown which input the predictions belong to: "
            "give another --output, or remove that folder"
        ) from error
    changed = [what for name, what in JOB_PARTS.items() if before.get(name) != job[name]]
    if changed:
        raise RecsysError(
            f"{output} holds predictions made with a different {' and a different '.join(changed)}: give "
            "another --output, or remove that folder"
        )


class _Footer(NamedTuple):
    """The number of rows of a part, and of those that were left out as bad."""

    rows: int
    left_out: int


def _read_footer(part: Path) -> _Footer:
    try:
        with pq.ParquetFile(part) as written:
            noted = (written.schema_arrow.metadata or {})[LEFT_OUT.encode()]
            return _Footer(written.metadata.num_rows, int(noted))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        what = f"not a file of predictions ({first_line(error)})"
        raise RecsysError(f"{part}: {what}; remove it and start the same command again") from error
