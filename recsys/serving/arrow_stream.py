"""Reads Arrow IPC streams that come from strangers, and shares their memory.

pyarrow's reader does what a stream says: it unpacks compressed buffers, and builds whatever a few bytes can
describe. This reader accepts columns of integers, floating-point numbers, texts and lists of them. Everything
else is refused before memory is taken for it, and every array is validated before it is used.

The format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
Fields of its flatbuffers have the numbers that they have in `Message.fbs` and `Schema.fbs` of Arrow.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from recsys.data.arrow import is_text
from recsys.serving.schema import refused

_CONTINUATION = b"\xff\xff\xff\xff"
_VERSIONS = (3, 4)
"""Versions 4 and 5 of the format, which differ in nothing that is read here."""

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

_MOST_COLUMNS, _LONGEST_NAME, _LONGEST_SCHEMA = 4096, 256, 1 << 20
"""Bounds of a schema. Without them a few bytes that are referred to often could become much."""


class Message(NamedTuple):
    """A schema or a batch of rows.

    Attributes:
        metadata: the flatbuffer that describes it.
        start: place in the stream at which its body begins.
        size: bytes of the body.
    """

    metadata: bytes
    start: int
    size: int


def read_messages(stream: bytes) -> Iterator[Message]:
    """Yields the messages of a stream.

    Raises:
        ValueError, struct.error: the stream is malformed.
    """
    place = 0
    while place < len(stream):
        size = _number(stream, "<i", place + 4)
        if stream[place : place + 4] != _CONTINUATION or size < 0:
            raise ValueError(f"at byte {place} there is no message")
        if size == 0:
            return
        start = place + 8 + size
        metadata = stream[place + 8 : start]
        message = _Table(metadata, _number(metadata, "<I", 0))
        place = start + message.number(3, "<q")
        if not start <= place <= len(stream):
            raise ValueError(f"the message at byte {start - 8 - size} is cut off")
        if message.number(0, "<h") not in _VERSIONS:
            raise ValueError("its version is too old or too new; versions 4 and 5 of Arrow's format are read")
        yield Message(metadata, start, place - start)


def read_schema(metadata: bytes) -> pa.Schema:
    """Returns the names and types of a stream's columns, given the metadata of its first message.

    Raises:
        ValueError, struct.error: the schema is malformed or too large.
        InvalidRequestError: byte order, or the type of a column, are not accepted.
    """
    schema = _header(metadata, _SCHEMA, "a schema")
    if len(metadata) > _LONGEST_SCHEMA:
        raise ValueError(f"its schema has {len(metadata):,} bytes; at most {_LONGEST_SCHEMA:,} are allowed")
    if schema.number(0, "<h"):
        raise refused("", "the stream is big-endian; send it little-endian")
    if b"ARROW:extension:name" in metadata:
        raise refused("", "a column has an extension type; send what it is stored as")
    names = []
    kinds = []
    for field in schema.tables(1, _MOST_COLUMNS):
        names.append(field.text(0))
        kinds.append(_kind(field, names[-1], 0))
    return pa.schema(list(zip(names, kinds, strict=True)))


def read_rows(
    stream: pa.Buffer, message: Message, schema: pa.Schema, before: int, most: int
) -> pa.RecordBatch:
    """Returns the rows of a message, whose arrays share the stream's memory.

    Args:
        stream: the whole stream.
        message: a message of it.
        schema: its schema.
        before: number of rows in the messages before it.
        most: most rows of the stream.

    Raises:
        ValueError, StopIteration, struct.error: the message is malformed.
        InvalidRequestError: it is compressed, or has more rows.
    """
    header = _header(message.metadata, _RECORD_BATCH, "rows; dictionaries and tensors are not accepted")
    if header.place(3) is not None:
        raise refused("", "the stream is compressed; send it without compression")
    count = header.number(0, "<q")
    if before + count > most:
        raise refused("rows", f"there are more than {most:,} rows; send fewer at a time")
    nodes, buffers = header.pairs(1), _buffers(stream, message, header)
    arrays = []
    for field in schema:
        try:
            array = _array(field.type, nodes, buffers)
            array.validate(full=True)
        except ValueError as error:
            raise ValueError(f"column {field.name}: {error}") from None
        if len(array) != count:
            raise ValueError(f"column {field.name} has {len(array):,} rows in a batch of {count:,}")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _buffers(stream: pa.Buffer, message: Message, header: "_Table") -> Iterator[pa.Buffer]:
    """Yields the buffers of a message. None may share bytes with others, or could be copied many times."""
    end = 0
    for offset, length in header.pairs(2):
        if not end <= offset <= offset + length <= message.size or (message.start + offset) % 8:
            raise ValueError("a buffer is not where it should be: they follow each other, at multiples of 8")
        end = offset + length
        yield stream.slice(message.start + offset, length)


def _array(kind: Any, nodes: Iterator[tuple[int, int]], buffers: Iterator[pa.Buffer]) -> pa.Array:
    """Returns the next array, which has yet to be validated."""
    (length, nulls), present, data = next(nodes), next(buffers), next(buffers)
    if length < 0:
        raise ValueError(f"an array has {length} values")
    parts, children = [present if nulls and present.size else None, data], None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        children = [_array(kind.value_type, nodes, buffers)]
    elif is_text(kind):
        parts.append(next(buffers))
    # Buffers of an empty array may lack even the first offset.
    return pa.Array.from_buffers(kind, length, parts, -1, 0, children) if length else pa.array([], kind)


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
