"""Reads Arrow IPC streams that come from strangers, and shares their memory.

pyarrow's reader does what a stream says: it unpacks compressed buffers, and builds whatever a few bytes can
describe. So columns of integers, floating-point numbers, texts and lists of them are accepted here, and all
else is refused by the descriptions of schema and rows, before pyarrow reads the rows.

The format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
Fields of its flatbuffers have the numbers that they have in `Message.fbs` and `Schema.fbs` of Arrow.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from recsys.serving.schema import refused

_CONTINUATION = b"\xff\xff\xff\xff"
_VERSION = 4
"""Version 5 of the format, of 2020. Version 4 had another way to say that buffers are compressed."""

_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOAT, _TEXT, _LIST, _LARGE_TEXT, _LARGE_LIST = 2, 3, 5, 12, 20, 21
_TYPES = (
    "none null int float binary string bool decimal date time timestamp interval list struct union "
    "fixed-size-binary fixed-size-list map duration large-binary large-string large-list run-end-encoded "
    "binary-view string-view list-view large-list-view"
).split()
_SIGNED = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_UNSIGNED = {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}
_FLOATS = {1: pa.float32(), 2: pa.float64()}
_LISTS = {_LIST: pa.list_, _LARGE_LIST: pa.large_list}

_MOST_COLUMNS, _LONGEST_NAME, _LONGEST = 4096, 256, 1 << 20
"""Bounds of a schema, and bytes of a description, in which things that are referred to often become much."""


class Message(NamedTuple):
    """A schema or a batch of rows.

    Attributes:
        metadata: the flatbuffer that describes it.
        start, stop: places in the stream at which it begins and ends.
        size: bytes of its body.
    """

    metadata: bytes
    start: int
    stop: int
    size: int


def read_messages(stream: bytes) -> Iterator[Message]:
    """Yields the messages of a stream.

    Raises:
        ValueError, struct.error: the stream is malformed.
    """
    start = 0
    while start < len(stream):
        length = _number(stream, "<i", start + 4)
        if stream[start : start + 4] != _CONTINUATION or length < 0:
            raise ValueError(f"at byte {start} there is no message")
        if length > _LONGEST:
            raise ValueError(f"a description has {length:,} bytes; at most {_LONGEST:,} are allowed")
        if length == 0:
            return
        metadata = stream[start + 8 : start + 8 + length]
        message = _Table(metadata, _number(metadata, "<I", 0))
        size = message.number(3, "<q")
        stop = start + 8 + length + size
        if size < 0 or stop > len(stream):
            raise ValueError(f"the message at byte {start} is cut off")
        if message.number(0, "<h") != _VERSION or message.place(4) is not None:
            raise ValueError("it is not of version 5 of Arrow's format, or its messages have metadata")
        yield Message(metadata, start, stop, size)
        start = stop


def read_schema(metadata: bytes) -> pa.Schema:
    """Returns the names and types of a stream's columns, given the metadata of its first message.

    Raises:
        ValueError, struct.error: the schema is malformed or too large.
        InvalidRequestError: byte order, or the type of a column, are not accepted.
    """
    schema = _header(metadata, _SCHEMA, "a schema")
    if schema.number(0, "<h"):
        raise refused("", "the stream is big-endian; send it little-endian")
    if b"ARROW:extension:name" in metadata:
        raise refused("", "a column has an extension type; send what it is stored as")
    columns = []
    for field in schema.tables(1, _MOST_COLUMNS):
        name = field.text(0)
        columns.append((name, _kind(field, name, 0)))
    return pa.schema(columns)


def read_rows(
    stream: pa.Buffer, message: Message, schema: pa.Schema, before: int, most: int
) -> pa.RecordBatch:
    """Returns the rows of a message, whose arrays share the stream's memory.

    Args:
        stream: the whole stream.
        message: a message of it.
        schema: its schema, as `read_schema` returned it.
        before: number of rows in the messages before it.
        most: most rows of the stream.

    Raises:
        ValueError, OSError, pa.ArrowException, struct.error: the message is malformed.
        InvalidRequestError: it is compressed, or has too many rows.
    """
    header = _header(message.metadata, _RECORD_BATCH, "rows; dictionaries and tensors are not accepted")
    if header.place(3) is not None:
        raise refused("", "the stream is compressed; send it without compression")
    count = header.number(0, "<q")
    if before + count > most:
        raise refused("rows", f"there are more than {most:,} rows; send fewer at a time")
    end = 0
    for offset, length in header.pairs(2):
        # Buffers that share bytes could be copied many times.
        if not end <= offset <= offset + length <= message.size:
            raise ValueError("a buffer is not where it should be: they follow each other")
        end = offset + length
    whole = pa.ipc.read_message(stream.slice(message.start, message.stop - message.start))
    rows = pa.ipc.read_record_batch(whole, schema)
    rows.validate(full=True)
    return rows


def _kind(field: "_Table", column: str, depth: int) -> pa.DataType:
    number = field.number(2, "<B")
    if field.place(4) is not None:
        raise refused(column, "it is dictionary-encoded; send its values")
    if number in _LISTS and depth < 2:
        (child,) = field.tables(5, 1)
        return _LISTS[number](_kind(child, column, depth + 1))
    declared = field.table(3)
    kind = None
    if number == _INT:
        widths = _SIGNED if declared.number(1, "<B") else _UNSIGNED
        kind = widths.get(declared.number(0, "<i"))
    elif number == _FLOAT:
        kind = _FLOATS.get(declared.number(0, "<h"))
    elif number in (_TEXT, _LARGE_TEXT):
        kind = pa.string() if number == _TEXT else pa.large_string()
    if kind is None:
        name = _TYPES[number] if number < len(_TYPES) else f"unknown type {number}"
        raise refused(
            column,
            f"its type is {'list of ' * depth}{name}; send integers, float32, float64, string or lists of "
            "these",
        )
    return kind


def _header(metadata: bytes, kind: int, wanted: str) -> "_Table":
    message = _Table(metadata, _number(metadata, "<I", 0))
    if message.number(1, "<B") != kind:
        raise ValueError(f"it has another message where it should have {wanted}")
    return message.table(2)


def _number(data: bytes, form: str, place: int) -> int:
    if place < 0:
        raise ValueError("it refers to a place before its beginning")
    return struct.unpack_from(form, data, place)[0]


class _Table:
    """A table of a flatbuffer, whose fields are numbered. Reading beyond the flatbuffer raises an error."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data, self._start = data, start
        self.offsets = start - _number(data, "<i", start)
        self._size = _number(data, "<H", self.offsets)

    def place(self, field: int) -> int | None:
        """Returns the place of a field; None if it is not there and has its default."""
        entry = 4 + 2 * field
        offset = _number(self._data, "<H", self.offsets + entry) if entry < self._size else 0
        return self._start + offset if offset else None

    def number(self, field: int, form: str) -> int:
        """Returns a number. All numbers that are read here have a default of 0."""
        place = self.place(field)
        return 0 if place is None else _number(self._data, form, place)

    def table(self, field: int) -> "_Table":
        """Returns a table within this one."""
        if (place := self.place(field)) is None:
            raise ValueError("a part of its description is missing")
        return _Table(self._data, place + _number(self._data, "<I", place))

    def tables(self, field: int, most: int) -> list["_Table"]:
        """Returns a list of tables, which are descriptions of columns."""
        start, count = self.vector(field)
        if count > most:
            raise ValueError(f"there are {count:,} columns in one place; at most {most:,} are allowed")
        places = range(start, start + 4 * count, 4)
        return [_Table(self._data, place + _number(self._data, "<I", place)) for place in places]

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """Returns a list of pairs of numbers."""
        start, count = self.vector(field)
        return struct.iter_unpack("<qq", self._data[start : start + 16 * count])

    def text(self, field: int) -> str:
        """Returns the name of a column."""
        start, count = self.vector(field)
        if count > _LONGEST_NAME:
            raise ValueError(f"the name of a column has {count:,} bytes; at most {_LONGEST_NAME} are allowed")
        return self._data[start : start + count].decode()

    def vector(self, field: int) -> tuple[int, int]:
        """Returns the place of a list's first element, and their number."""
        if (place := self.place(field)) is None:
            return 0, 0
        place += _number(self._data, "<I", place)
        return place + 4, _number(self._data, "<I", place)
