"""Reads Arrow IPC streams that come from strangers, and shares their memory.

pyarrow checks that what a stream says about itself is consistent. But it also unpacks compressed buffers, few
bytes of which may become gigabytes, and has no option to refuse them. So the description of rows is looked at
before pyarrow reads them.

The format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
Fields of its flatbuffers have the numbers that they have in `Message.fbs` of Arrow.
"""

import struct
from collections.abc import Callable, Iterator

import pyarrow as pa

from recsys.serving.schema import refused

_VERSION = 4
"""Version 5 of the format, of 2020. Version 4 had another way to say that buffers are compressed."""

_LONGEST = 1 << 16
"""Most bytes of a schema. It may refer to a part again and again: pyarrow turns so many bytes into some tens
of MB at most, and a million bytes into hundreds. Also, some schemas are remembered."""


def read_batches(stream: bytes, schema_of: Callable[[bytes], pa.Schema]) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a stream, whose arrays share its memory.

    Args:
        stream: the whole stream.
        schema_of: returns the schema, given its description, or refuses it; see `read_schema`.

    Raises:
        ValueError, OSError, pa.ArrowException: the stream is malformed.
        InvalidRequestError: it is compressed.
    """
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(stream))
    messages = iter(reader)
    first = next(messages, None)
    if first is None or first.type != "schema":
        raise ValueError("it does not begin with a schema")
    if first.metadata.size > _LONGEST:
        raise ValueError(f"its schema has {first.metadata.size:,} bytes; at most {_LONGEST:,} are allowed")
    schema = schema_of(first.metadata.to_pybytes())
    place = first.metadata.size
    for message in messages:
        if message.type != "record batch":
            raise ValueError(f"there is a {message.type} where it should have rows")
        if _is_compressed(message.metadata.to_pybytes()):
            raise refused("", "the stream is compressed; send it without compression")
        place += message.metadata.size
        if place % 8:
            # Numbers would lie where the processor, or compiled code, may not expect them.
            raise ValueError("its messages are not padded to multiples of 8 bytes")
        place += message.body.size
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        # Columns that share bytes could be copied many times.
        if batch.nbytes > message.body.size:
            raise ValueError("buffers overlap")
        yield batch


def read_schema(description: bytes) -> pa.Schema:
    """Returns the schema that a message describes.

    Raises:
        OSError, pa.ArrowException: the description is malformed.
    """
    message = b"\xff\xff\xff\xff" + struct.pack("<i", len(description)) + description
    return pa.ipc.read_schema(pa.py_buffer(message))


def is_accepted(kind: pa.DataType, depth: int = 2) -> bool:
    """Returns whether a column may have a type: integers, float32, float64, texts, and lists of these."""
    if depth and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return is_accepted(kind.value_type, depth - 1)
    accepted = (
        pa.types.is_integer,
        pa.types.is_float32,
        pa.types.is_float64,
        pa.types.is_string,
        pa.types.is_large_string,
    )
    return not isinstance(kind, pa.BaseExtensionType) and any(check(kind) for check in accepted)


def _is_compressed(description: bytes) -> bool:
    """Returns whether pyarrow would unpack buffers, given a message's flatbuffer, which it has verified."""
    (message,) = struct.unpack_from("<I", description)
    version, rows, metadata = (_place(description, message, number) for number in (0, 2, 4))
    is_known = version is not None and struct.unpack_from("<h", description, version) == (_VERSION,)
    if not is_known or rows is None or metadata is not None:
        raise ValueError("it is not of version 5 of Arrow's format, or its messages have metadata")
    return _place(description, rows + struct.unpack_from("<I", description, rows)[0], 3) is not None


def _place(data: bytes, table: int, number: int) -> int | None:
    """Returns the place of a field in a table of a flatbuffer; None if it is absent and has its default."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry >= struct.unpack_from("<H", data, fields)[0]:
        return None
    offset = struct.unpack_from("<H", data, fields + entry)[0]
    return table + offset if offset else None
