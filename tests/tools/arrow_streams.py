"""Writes tables as Arrow IPC streams, as clients do."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa


def stream_of(rows: pa.Table | Sequence[pa.RecordBatch], size: int | None = None, **options: Any) -> bytes:
    """A stream with a table, in batches of at most `size` rows, or with the batches that are given."""
    batches = rows.to_batches(max_chunksize=size) if isinstance(rows, pa.Table) else rows
    schema = rows.schema if isinstance(rows, pa.Table) else batches[0].schema
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()
