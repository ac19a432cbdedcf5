"""What a source of rows is: a list of files, each cut into row groups that can be read on their own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import fsspec
import pyarrow as pa

from recsys import protos as pb
from recsys.config.registry import pick
from recsys.data.plan.epoch import RowGroup
from recsys.data.schema.contract import Mode, check_same_schema, check_schema, needed_columns
from recsys.errors import DataError


@dataclass(frozen=True)
class FileMark:
    """What is remembered of a file, to see whether it is the same one.

    Attributes:
        path: as errors name it.
        size: bytes.
        fingerprint: hash that changes when the file's rows or layout do.
    """

    path: str
    size: int
    fingerprint: str


@dataclass(frozen=True)
class File(FileMark):
    """One file of a source.

    Attributes:
        rows: number of rows of each row group.
        schema: of all its columns.
    """

    rows: tuple[int, ...]
    schema: pa.Schema


class Source(ABC):
    """Rows in files. Small enough to be sent to reader processes; `read` opens files where it runs.

    A subclass is registered under its message and takes `(config, *, pipeline)`.
    """

    files: list[File]
    unique_keys = False
    """Whether no two rows can have the same key."""

    @abstractmethod
    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        """The rows of one row group.

        Args:
            file: index into `files`.
            row_group: number within the file.
            columns: names of the columns to read, all present.

        Raises:
            DataError: the file is broken, gone or no longer the one that was listed.
        """

    @property
    def row_groups(self) -> list[RowGroup]:
        """Row groups of all files, in order."""
        found = []
        for number, file in enumerate(self.files):
            first = 0
            for group, rows in enumerate(file.rows):
                found.append(RowGroup(number, group, first, rows))
                first += rows
        return found

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(sum(file.rows) for file in self.files)

    def marks(self) -> list[FileMark]:
        """What a checkpoint stores to see whether a run goes on with the same files."""
        return [FileMark(file.path, file.size, file.fingerprint) for file in self.files]

    def check(self, pipeline: pb.Pipeline, mode: Mode) -> list[str]:
        """Checks the columns of every file and gives the names of those to read.

        Raises:
            DataError: a file that does not fit the config, or differs from the first one.
        """
        if not self.files:
            return []
        first = self.files[0]
        check_schema(first.schema, pipeline, mode, first.path)
        columns = needed_columns(pipeline, mode, first.schema)
        for file in self.files[1:]:
            check_schema(file.schema, pipeline, mode, file.path)
            check_same_schema(file.schema, file.path, first.schema, first.path, columns)
        return columns


def open_source(source: pb.Source, pipeline: pb.Pipeline) -> Source:
    """The source that a message describes.

    Raises:
        DataError: nothing is set in it, or its files cannot be read.
    """
    if source.WhichOneof("source") is None:
        raise DataError(
            "a source of rows is empty. Set one of parquet, csv, synthetic, e.g. data.train.parquet.paths."
        )
    component = pick(source)
    return component.cls(component.config, pipeline=pipeline)


def find_files(patterns: list[str], suffix: str) -> list[str]:
    """Files of paths, folders and glob patterns, in the given order and sorted within each pattern.

    Args:
        patterns: local paths or fsspec addresses; a folder stands for all files in and below it that end in
            `suffix` and have no part that starts with `.` or `_`.

    Raises:
        DataError: a pattern without a file, or a file found twice.
    """
    if not patterns:
        raise DataError(f"no {suffix} files are given. Set `paths`, e.g. paths: 'data/train'.")
    found: list[str] = []
    for pattern in patterns:
        fs, path = fsspec.core.url_to_fs(pattern)
        # A name may have the characters of a pattern in it, and then it is meant.
        if any(character in path for character in "*?[") and not fs.exists(path):
            names = [name for name in fs.glob(path) if fs.isfile(name)]
        elif fs.isdir(path):
            names = [name for name in fs.find(path) if name.endswith(suffix) and not _hidden(name, path)]
        else:
            names = [path] if fs.exists(path) else []
        if not names:
            raise DataError(
                f"{pattern}: no such file, or no {suffix} file in the folder or behind the pattern. "
                "Relative paths count from the folder in which the command runs."
            )
        local = fs.protocol in ("file", "local") or "file" in fs.protocol
        found += [name if local else fs.unstrip_protocol(name) for name in sorted(names)]
    twice = [name for name in dict.fromkeys(found) if found.count(name) > 1]
    if twice:
        raise DataError(f"{twice[0]}: `paths` names it twice; its rows would count twice. Name it once.")
    return found


def _hidden(name: str, folder: str) -> bool:
    parts = name[len(folder) :].strip("/").split("/")
    return any(part.startswith((".", "_")) for part in parts)
