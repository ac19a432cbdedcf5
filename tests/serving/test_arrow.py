"""Rows as Arrow streams: good ones are read as they were written, and nothing that a stranger sends is
unpacked, crashes the process, or takes much memory."""

import random
import struct
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from recsys import protos as pb
from recsys.config.feature_kinds import Values
from recsys.data.schema.contract import FileColumn, Kind
from recsys.serving import table as table_module
from recsys.serving.arrow_schema import ArrowSchema
from recsys.serving.arrow_stream import _place, read_batches, read_schema
from recsys.serving.schema import InvalidRequestError, RequestLimits
from recsys.serving.table import TableMaker
from tests.tools.arrow_streams import stream_of


def reader(values: Values) -> SimpleNamespace:
    return SimpleNamespace(values=values, vocabulary=None)


COLUMNS = [
    FileColumn("request_time", pb.USER, Kind.TIME),
    FileColumn("city", pb.USER, Kind.FEATURE, readers=(reader(Values.TEXT),)),
    FileColumn("age", pb.USER, Kind.FEATURE, readers=(reader(Values.NUMBER),)),
    FileColumn("uih_item", pb.HISTORY, Kind.FEATURE, readers=(reader(Values.ID),)),
    FileColumn("uih_tag", pb.HISTORY, Kind.FEATURE, multi_valued=True, readers=(reader(Values.INTEGER),)),
    FileColumn("candidate_item", pb.CANDIDATE, Kind.FEATURE, readers=(reader(Values.ID),)),
    FileColumn("candidate_timestamps", pb.CANDIDATE, Kind.TIME, required=False),
]
SCHEMA = ArrowSchema(COLUMNS, ["user_id"], RequestLimits(rows=5, history=4, candidates=3))
TABLE = pa.table(
    {
        "user_id": ["a", None, "c"],
        "request_time": [10, 20, 30],
        "city": ["Köln", "", "Rome"],
        "age": [1.5, 2.0, float("nan")],
        "uih_item": [[1, 2], [], [3]],
        "uih_tag": [[[1], [2, 3]], [], [[]]],
        "candidate_item": [[7, 8, 9], [7], [8]],
    }
)


def changed(name: str, values, kind: pa.DataType | None = None) -> pa.Table:
    """The table with a column in place of another one."""
    return TABLE.set_column(TABLE.column_names.index(name), name, pa.array(values, kind))


def refused(body: bytes) -> InvalidRequestError:
    """The error about a stream, for which no more memory is taken than for a few numbers."""
    ordinary = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(ordinary)
    pa.set_memory_pool(counting)
    try:
        with pytest.raises(InvalidRequestError) as caught:
            SCHEMA.parse(body)
    finally:
        pa.set_memory_pool(ordinary)
    assert caught.value.status in (400, 422) and counting.max_memory() < 1 << 14
    return caught.value


def told(body: bytes) -> str:
    """Everything that is said about a stream that is refused."""
    return refused(body).failure.model_dump_json()


def test_columns_are_read_as_they_were_written_in_any_number_of_batches():
    for size in (None, 2, 1):
        rows = SCHEMA.parse(stream_of(TABLE, size))
        assert rows.schema.names == TABLE.column_names
        assert str(rows.to_pylist()) == str(TABLE.to_pylist())
    # Slices begin within buffers.
    part = TABLE.slice(1, 2)
    assert str(SCHEMA.parse(stream_of(part)).to_pylist()) == str(part.to_pylist())


JSON = {
    "request_time": [40],
    "city": ["Bonn"],
    "age": [3.0],
    "uih_item": [["x", "y"]],
    "uih_tag": [[[], [5]]],
    "candidate_item": [[]],
    "candidate_timestamps": [[]],
}
READ = [column.name for column in COLUMNS[:-1]]


@pytest.fixture
def maker(monkeypatch):
    monkeypatch.setattr(table_module, "file_columns", lambda pipeline, mode: COLUMNS)
    return TableMaker(pb.Pipeline())


def test_rows_of_json_and_of_streams_become_one_table(maker):
    parts = (SCHEMA.parse(stream_of(part)) for part in (TABLE.slice(0, 1), TABLE.slice(1, 2)))
    streams = [stream_of([part.select(READ)]) for part in parts]
    joined = maker.table(JSON, streams)
    assert joined["uih_item"].to_pylist() == [["x", "y"], ["1", "2"], [], ["3"]]
    # Integers stay integers where all requests have them, also beside a list without a type.
    assert joined["candidate_item"].to_pylist() == [[], [7, 8, 9], [7], [8]]
    # The request's time stands for the times of candidates that a request leaves out.
    assert joined["candidate_timestamps"].to_pylist() == [[], [10, 10, 10], [20], [30]]
    assert joined["city"].to_pylist() == ["Bonn", "Köln", "", "Rome"]
    alone = maker.table({}, streams)
    assert "candidate_timestamps" not in alone.column_names and alone.num_rows == 3


INTEGERS, TEXTS = [pa.int8(), pa.uint16(), pa.int32(), pa.uint64()], [pa.string(), pa.large_string()]


@pytest.mark.parametrize("ids", INTEGERS + TEXTS)
@pytest.mark.parametrize("listed", [pa.list_, pa.large_list])
def test_requests_may_have_different_types(maker, ids, listed):
    number = ids if ids in INTEGERS else pa.float32()
    given = changed("candidate_item", pa.array([[1, 2], [], [3]]).cast(listed(ids)))
    given = given.set_column(TABLE.column_names.index("age"), "age", pa.array([1, 2, 3], number))
    rows = SCHEMA.parse(stream_of(given))
    assert rows.schema == given.schema
    joined = maker.table(JSON | {"candidate_item": [[9]]}, [stream_of([rows.select(READ)])])
    expected = [[9], [1, 2], [], [3]]
    if ids in TEXTS:
        expected = [[str(item) for item in row] for row in expected]
    assert joined["candidate_item"].to_pylist() == expected
    assert joined["age"].to_pylist() == [3.0, 1.0, 2.0, 3.0]
    assert joined.schema.field("city").type == pa.large_string()


LONG = [[1] * 5, [], []]


@pytest.mark.parametrize(
    ("table", "field", "message"),
    [
        (TABLE.drop_columns(["age"]), "age", "missing"),
        (TABLE.append_column("ages", pa.array([1, 2, 3])), "ages", "reads no such column; leave it out"),
        (TABLE.append_column("age", pa.array([1, 2, 3])), "age", "occurs 2 times"),
        (changed("request_time", [1.0, 2.0, 3.0]), "request_time", "is double; it must be int64 seconds"),
        (changed("city", [1, 2, 3]), "city", "it must be string"),
        (changed("uih_item", [1, 2, 3]), "uih_item", "it must be list of int64 or string"),
        (changed("user_id", [1.5, 2.5, 3.5]), "user_id", "a key is an integer or a text"),
        (changed("uih_item", LONG), "rows[0].uih_item", "has 5 elements; it may have at most 4"),
        (changed("candidate_item", LONG[::-1]), "rows[2].candidate_item", "at most 3"),
        (pa.concat_tables([TABLE, TABLE]), "rows", "there are more than 5 rows"),
        (TABLE.slice(0, 0), "rows", "send at least one row"),
        (TABLE.select([]), "request_time", "missing"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_told_by_column_and_row(table, field, message):
    error = refused(stream_of(table))
    told = {finding.field: finding.message for finding in error.failure.findings}
    assert error.status == 422 and message in told[field]


def test_rows_are_counted_over_batches():
    late = pa.concat_tables([TABLE.slice(0, 2), changed("uih_item", LONG)])
    assert refused(stream_of(late, 1)).failure.findings[0].field == "rows[2].uih_item"
    assert "there are more than 5 rows" in told(stream_of(pa.concat_tables([TABLE] * 2), 2))
    empty = pa.RecordBatch.from_pylist([], TABLE.schema)
    assert "more than 5 batches" in told(stream_of([empty] * 6))
    assert SCHEMA.parse(stream_of([empty, *TABLE.to_batches()])).num_rows == 3


STRANGE = {
    "null": pa.nulls(3),
    "bool": pa.array([True] * 3),
    "binary": pa.array([b"x"] * 3),
    "halffloat": pa.array(np.array([1, 2, 3], np.float16)),
    "timestamp": pa.array([1, 2, 3], pa.timestamp("s")),
    "struct": pa.array([{"x": 1}] * 3),
    "map": pa.array([[("x", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
    "fixed_size_list": pa.array([[1, 2]] * 3, pa.list_(pa.int64(), 2)),
    "string_view": pa.array(["x"] * 3, pa.string_view()),
    "list_view": pa.array([[1]] * 3, pa.list_view(pa.int64())),
    "run_end_encoded": pa.RunEndEncodedArray.from_arrays([3], [1]),
    "dictionary": pa.array(["x", "y", "x"]).dictionary_encode(),
    "list<item: list<item: list": pa.array([[[[1]]]] * 3),
    "extension": pa.array([b"0123456789abcdef"] * 3, pa.uuid()),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_type_that_is_not_accepted_is_told_by_its_column(name):
    error = refused(stream_of(changed("age", STRANGE[name])))
    (finding,) = error.failure.findings
    assert error.status == 422 and finding.field == "age" and f"its type is {name}" in finding.message


def nested(depth: int) -> pa.DataType:
    return pa.list_(nested(depth - 1)) if depth else pa.int64()


def test_small_streams_that_describe_much_are_refused_before_memory_is_taken():
    zeros = [pa.record_batch([np.zeros(1 << 20)], ["age"])]
    for codec in ("lz4", "zstd"):
        assert "without compression" in told(stream_of(TABLE, compression=codec))
        body = stream_of(zeros, compression=codec)
        assert len(body) < 1 << 16 and refused(body)
    nothing = pa.Array.from_buffers(pa.null(), 2**40, [None])
    endless = stream_of([pa.record_batch([nothing], ["age"])], allow_64bit=True)
    assert len(endless) < 1000 and "its type is null" in told(endless)
    assert "list<item: list" in told(stream_of(changed("age", [None] * 3, nested(60))))
    assert "386 more findings" in told(stream_of(pa.table({f"c{i}": [1] for i in range(400)})))
    assert "300 characters" in told(stream_of(pa.table({"c" * 300: [1]})))
    for many in (
        pa.table({f"c{i}": [1] for i in range(4097)}),
        TABLE.replace_schema_metadata({"pandas": "x" * (1 << 16)}),
    ):
        assert "at most 65,536 are allowed" in told(stream_of(many))


MALFORMED = "the body is not an Arrow IPC stream that can be read: "


class Parts:
    """Places of numbers in a stream, which can be changed.

    Args:
        table: what the stream holds.
        number: number of the message, of which 0 is the schema.
    """

    def __init__(self, table: pa.Table = TABLE, number: int = 1) -> None:
        self.body = bytearray(stream_of(table))
        messages = list(pa.ipc.MessageReader.open_stream(pa.py_buffer(bytes(self.body))))
        self.description = messages[number].metadata.to_pybytes()
        self.first = self.body.index(self.description)
        (self.message,) = struct.unpack_from("<I", self.description)
        header = _place(self.description, self.message, 2)
        self.header = header + struct.unpack_from("<I", self.description, header)[0]

    def vector(self, field: int) -> int:
        """The place of the first element of a list of the message's header."""
        place = _place(self.description, self.header, field)
        return place + struct.unpack_from("<I", self.description, place)[0] + 4

    def changed(self, place: int, form: str, value: int) -> bytes:
        """The stream with another number at a place in the message's description."""
        body = bytearray(self.body)
        struct.pack_into(form, body, self.first + place, value)
        return bytes(body)


def test_numbers_that_lie_are_found():
    batch = Parts()
    rows = _place(batch.description, batch.header, 0)
    # `uih_item` has number 4, after its lists come their values.
    nodes, buffers = batch.vector(1), batch.vector(2)
    lies = [(rows, value) for value in (2**62, -1, 2)]
    lies += [(nodes + 16 * 5, value) for value in (2**62, 0, -3)]
    # The offsets of the first column's texts: place and length.
    lies += [(buffers + 16, value) for value in (2**62, -8)]
    lies += [(buffers + 24, value) for value in (-1, 4)]
    for place, value in lies:
        assert MALFORMED in told(batch.changed(place, "<q", value)), (place, value)
    version = _place(batch.description, batch.message, 0)
    assert "not of version 5" in told(batch.changed(version, "<h", 3))
    # Four bytes more at the end of the schema's description, to which nothing in it refers.
    schema = Parts(number=0)
    length = len(schema.description)
    longer = schema.changed(-4, "<i", length + 4)
    assert "not padded" in told(longer[: 8 + length] + bytes(4) + longer[8 + length :])
    bad = pa.array([0, 1, 1, 1], pa.int32()).buffers()[1]
    words = pa.StringArray.from_buffers(3, bad, pa.py_buffer(b"\xff"))
    assert MALFORMED in told(stream_of(changed("city", words)))


def test_columns_do_not_share_bytes():
    """Otherwise a small stream could hold many large columns, and each would be copied."""
    batch = Parts(pa.table({"x": np.arange(1000), "y": np.arange(1000)}))
    size = _place(batch.description, batch.message, 3)
    assert struct.unpack_from("<q", batch.description, size) == (16_000,)
    whole = list(read_batches(bytes(batch.body), read_schema))
    assert whole[0].num_rows == 1000
    batch.body = bytearray(batch.changed(batch.vector(2) + 3 * 16, "<q", 0))
    shared = batch.changed(size, "<q", 8_000)[: batch.first + len(batch.description) + 8_000]
    with pytest.raises(ValueError, match="buffers overlap"):
        list(read_batches(shared, read_schema))


@pytest.mark.parametrize(
    "body", [b"", b"x", b"{}", b'{"rows": []}', b"\xff" * 100, b"\xff\xff\xff\xff" + bytes(4), bytes(1000)]
)
def test_a_body_that_is_no_stream_is_malformed(body):
    error = refused(body)
    assert error.status == 400 and error.failure.error.startswith(MALFORMED)


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """A stream with bytes cut off, left out, put in or changed, or with numbers that are extreme."""
    body = bytearray(whole)
    for _ in range(draw.choice((1, 2, 8))):
        place, damage = draw.randrange(len(body)), draw.randrange(6)
        if damage == 0:
            del body[place : place + draw.choice((1, 4, 8, 64, len(body)))]
            body = body or bytearray(1)
        elif damage == 1:
            body[place:place] = bytes(draw.choice((1, 4, 8)))
        elif damage == 2:
            place -= place % 4
            body[place : place + 4] = struct.pack("<I", draw.choice((0, 2**31 - 1, 2**31, 2**32 - 1)))
        else:
            body[place] = draw.choice((0, 1, 127, 128, 255, body[place] ^ (1 << draw.randrange(8))))
    return bytes(body)


@pytest.mark.parametrize("attempts", [600, pytest.param(100_000, marks=pytest.mark.slow)])
def test_damaged_streams_are_read_or_refused_and_nothing_else_happens(attempts):
    draw, whole = random.Random(attempts), [stream_of(TABLE, 2), stream_of(TABLE)]
    outcomes = set()
    for _ in range(attempts):
        try:
            rows = SCHEMA.parse(damaged(draw.choice(whole), draw))
        except InvalidRequestError as error:
            outcomes.add(error.status)
            assert error.status in (400, 422) and len(error.failure.model_dump_json()) < 20_000
        else:
            outcomes.add(200)
            # All values can be used.
            rows.validate(full=True)
            assert 0 < len(rows.to_pylist()) <= 5
    assert outcomes == {200, 400, 422}
