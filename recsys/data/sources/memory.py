"""Gives tables in memory an address that a config can name, so that they are read like files.

A table is kept as parquet in fsspec's file system `memory://`. The whole data path (checks, row groups,
shuffling, vocabularies, fingerprints) then works on it unchanged, but only in this process: reader processes
do not share its memory.
"""

import io
import itertools
import weakref

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

PROTOCOL = "memory://"
ROWS_PER_GROUP = 1024
"""Rows per row group, as the preparation tools write them."""

_numbers = itertools.count(1)


class MemoryFile:
    """A parquet file in memory with the rows of a table; it lives as long as this object.

    Args:
        table: the rows.
        name: name of the table in errors; the address is `memory:///recsys-<number>/<name>.parquet`.

    Attributes:
        address: the file's address.
    """

    def __init__(self, table: pa.Table, name: str) -> None:
        buffer = io.BytesIO()
        pq.write_table(table, buffer, row_group_size=ROWS_PER_GROUP)
        path = f"/recsys-{next(_numbers)}/{name}.parquet"
        fsspec.filesystem("memory").pipe_file(path, buffer.getvalue())
        self.address = PROTOCOL + path
        weakref.finalize(self, _remove, path)


def _remove(path: str) -> None:
    memory = fsspec.filesystem("memory")
    if memory.exists(path):
        memory.rm_file(path)
