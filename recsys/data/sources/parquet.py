"""Reads parquet files, local or through fsspec; pages that have checksums are checked against them."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from recsys import protos as pb
from recsys.config.registry import register
from recsys.data.arrow import first_line, open_parquet
from recsys.data.lru import Lru
from recsys.data.sources.base import File, Source, find_files
from recsys.errors import DataError

_OPEN_FILES = 32
_FOOTER_THREADS = 8
_TAIL = 8
"""Number of bytes after the footer: its length and the magic number PAR1."""


@register(pb.ParquetSource)
class ParquetSource(Source):
    """A source of parquet files, whose row groups are those of the files."""

    def __init__(self, files: list[File]) -> None:
        self.files = files
        self._open_files: Lru[pq.ParquetFile] = Lru(_OPEN_FILES)

    @classmethod
    def open(cls, config: pb.ParquetSource, *, pipeline: pb.Pipeline) -> "ParquetSource":
        """Reads the footer of every file.

        Raises:
            DataError: there is no file, or a file is not complete.
        """
        paths = find_files(list(config.paths), ".parquet")
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            return cls(list(pool.map(_describe, paths)))

    def __getstate__(self) -> dict:
        # Open files cannot be pickled; the other process opens its own.
        return {**self.__dict__, "_open_files": Lru(_OPEN_FILES)}

    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        """Reads a row group; see `Source.read`."""
        path = self.files[file].path
        opened = self._open_files.get(file, lambda: self._reopen(self.files[file]))
        try:
            # One thread, because each core already has a reader process.
            return opened.read_row_group(row_group, columns=columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path}, row group {row_group}: cannot be read ({first_line(error)}). "
                "The file is damaged; copy it again, or make a new one."
            ) from error

    def _reopen(self, listed: File) -> pq.ParquetFile:
        if _size(listed.path) != listed.size:
            raise DataError(f"{listed.path}: it changed while it was read. Start again once it is complete.")
        return _open_parquet(listed.path)


def _describe(path: str) -> File:
    opened = _open_parquet(path)
    metadata = opened.metadata
    return File(
        path=path,
        size=_size(path),
        fingerprint=_footer_hash(path),
        rows=tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)),
        schema=opened.schema_arrow.remove_metadata(),
    )


def _open_parquet(path: str) -> pq.ParquetFile:
    try:
        return open_parquet(path, "It may be cut off; copy it again, or make a new one.")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file.") from error


def _footer_hash(path: str) -> str:
    with _stream(path) as stream:
        end = stream.seek(0, 2)
        stream.seek(end - _TAIL)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(end - _TAIL - length)
        return hashlib.blake2b(stream.read(length), digest_size=16).hexdigest()


def _size(path: str) -> int:
    with _stream(path) as stream:
        return stream.seek(0, 2)


def _stream(path: str) -> BinaryIO:
    return fsspec.open(path, "rb").open()
