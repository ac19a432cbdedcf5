"""Defines the interface of a source of rows: a list of files, cut into row groups to be read one by one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from recsys import protos as pb
from recsys.config import fields
from recsys.config.registry import pick
from recsys.data.filesystems import open_filesystem
from recsys.data.schema.contract import Mode, check_same_schema, check_schema, needed_columns
from recsys.errors import DataError


@dataclass(frozen=True)
class FileMark:
    """Identifies the content of a file, so that a resumed run notices a changed file.

    Attributes:
        path: the file's address, as errors name it.
        size: number of bytes.
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
        schema: schema of all columns.
    """

    rows: tuple[int, ...]
    schema: pa.Schema


class RowGroup(NamedTuple):
    """Consecutive rows of a file that are read at once.

    Attributes:
        file: index of the file in its source.
        number: number of the row group within the file.
        first_row: row of the file at which the row group begins.
        num_rows: number of rows.
    """

    file: int
    number: int
    first_row: int
    num_rows: int


class Source(ABC):
    """A source of rows in files.

    A source is small enough to be sent to reader processes; `read` opens files in the process that calls it.
    A subclass is registered under its message and has a class method `open(config, *, pipeline)`; its
    constructor opens nothing.
    """

    files: list[File]
    unique_keys = False
    """True if no two rows can have the same key."""

    @classmethod
    def open(cls, config: Any, *, pipeline: pb.Pipeline) -> "Source":
        """Lists the files that a message names and reads their schemas.

        Raises:
            DataError: there is no file, or a file cannot be read.
        """
        raise NotImplementedError(f"{cls.__name__} is not made from a config")

    @abstractmethod
    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        """Reads the rows of one row group.

        Args:
            file: index into `files`.
            row_group: number of the row group within the file.
            columns: names of the columns to read, all of them present.

        Raises:
            DataError: the file is broken, is gone, or has changed since it was listed.
        """

    @property
    def row_groups(self) -> list[RowGroup]:
        """Row groups of all files, in order."""
        groups = []
        for number, file in enumerate(self.files):
            first = 0
            for group, rows in enumerate(file.rows):
                groups.append(RowGroup(number, group, first, rows))
                first += rows
        return groups

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        return sum(sum(file.rows) for file in self.files)

    def marks(self) -> list[FileMark]:
        """Returns the marks that a checkpoint stores, by which a resumed run recognizes its files."""
        return [FileMark(file.path, file.size, file.fingerprint) for file in self.files]

    def check(self, pipeline: pb.Pipeline, mode: Mode) -> list[str]:
        """Checks the columns of every file and returns the names of those to read.

        Raises:
            DataError: a file does not fit the config, or differs from the first file.
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
    """Opens the source that a message describes.

    Raises:
        DataError: the message is empty, or its files cannot be read.
    """
    if fields.chosen(source) is None:
        raise DataError(
            "a source of rows is empty. Set one of parquet, csv, synthetic, e.g. data.train.parquet.paths."
        )
    component = pick(source)
    return component.cls.open(component.config, pipeline=pipeline)


def find_files(patterns: list[str], suffix: str) -> list[str]:
    """Finds the files of paths, folders and glob patterns, in the order given and sorted within each pattern.

    Args:
        patterns: local paths or fsspec addresses. A folder stands for all files in and below it whose name
            ends in `suffix` and whose path within the folder has no part that starts with `.` or `_`.

    Raises:
        DataError: a pattern matches no file, or a file is named twice.
    """
    if not patterns:
        raise DataError(f"no {suffix} files are given. Set `paths`, e.g. paths: 'data/train'.")
    files: list[str] = []
    for pattern in patterns:
        fs, path = open_filesystem(pattern)
        # A file whose name contains characters of a pattern is taken literally.
        if any(character in path for character in "*?[") and not fs.exists(path):
            names = [name for name in fs.glob(path) if fs.isfile(name)]
        elif fs.isdir(path):
            names = [name for name in fs.find(path) if name.endswith(suffix) and not _hidden(name, path)]
        else:
            names = [path] if fs.exists(path) else []
        if not names:
            raise DataError(
                f"{pattern}: no such file, or no {suffix} file in the folder or matching the pattern. "
                "Relative paths count from the folder in which the command runs."
            )
        local = fs.protocol in ("file", "local") or "file" in fs.protocol
        files += [name if local else fs.unstrip_protocol(name) for name in sorted(names)]
    twice = [name for name in dict.fromkeys(files) if files.count(name) > 1]
    if twice:
        raise DataError(f"{twice[0]}: `paths` names it twice; its rows would count twice. Name it once.")
    return files


def _hidden(name: str, folder: str) -> bool:
    parts = name[len(folder) :].strip("/").split("/")
    return any(part.startswith((".", "_")) for part in parts)
