"""Rows that repeat a key: found wherever they are, by brute force over all pairs, and handled as bad rows."""

from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.data.plan import duplicates
from recsys.data.plan.duplicates import count_repeated, find_duplicates
from recsys.data.schema import row_keys
from recsys.data.sources import File, Source, open_source
from recsys.errors import DataError

RULE = LayoutRule(num_contextual=2, targets=True)


class Tables(Source):
    """Files of row groups that lie in memory."""

    def __init__(self, files: list[list[pa.Table]]):
        self.tables = files
        self.files = [
            File(f"file-{i}", 0, "", tuple(map(len, groups)), groups[0].schema)
            for i, groups in enumerate(files)
        ]

    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        return self.tables[file][row_group].select(columns)


def skipping(limit: int = 1000, keys: tuple[str, ...] = ("user", "text")) -> pb.Pipeline:
    pipeline = pb.Pipeline()
    pipeline.data.key_columns[:] = keys
    pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    pipeline.data.bad_rows.limit = limit
    return pipeline


KEYS = st.tuples(
    st.one_of(st.none(), st.integers(-2, 3)),
    st.one_of(st.none(), st.sampled_from(["", "a", "b"])),
    st.integers(0, 2),
)
FILES = st.lists(st.lists(st.lists(KEYS, max_size=7), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=80, deadline=None)
@given(files=FILES, bits=st.sampled_from([0, 1, 3, 64]), held=st.sampled_from([1, 5, 1000]))
def test_all_repeats_are_found(files, bits, held):
    schema = pa.schema({"user": pa.int64(), "text": pa.string(), "request_time": pa.int64()})
    source = Tables(
        [
            [
                pa.Table.from_pylist(
                    [dict(zip(schema.names, row, strict=True)) for row in group], schema=schema
                )
                for group in groups
            ]
            for groups in files
        ]
    )
    rows = [row for groups in files for group in groups for row in group]
    expected = {}
    for i, row in enumerate(rows):
        if None not in row and row in rows[:i]:
            expected[i] = rows.index(row)
    hash_keys = row_keys.hash_keys

    def few_hashes(keys: pa.Table):
        # Different keys fall together.
        hashes, known = hash_keys(keys)
        return hashes >> np.uint64(64 - bits) << np.uint64(64 - bits) if bits < 64 else hashes, known

    def no_hash(keys: pa.Table):
        hashes, known = hash_keys(keys)
        return np.zeros_like(hashes), known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_HASHES", held)
        patch.setattr(duplicates, "_TABLES", 1)
        patch.setattr(duplicates, "hash_keys", few_hashes if bits else no_hash)
        actual = find_duplicates(source, skipping())
    assert dict(zip(actual.rows.tolist(), actual.firsts.tolist(), strict=True)) == expected
    assert actual.rows.tolist() == sorted(expected)
    names = [
        f"file-{file}, row {row}" for file, groups in enumerate(files) for row in range(sum(map(len, groups)))
    ]
    for place, (row, first) in enumerate(sorted(expected.items())):
        assert actual.name(row) == names[row] and actual.first(place) == names[first]
    for group in source.row_groups:
        inside, places = actual.of_table(group.file, group.first_row, group.num_rows)
        whole = [names.index(f"file-{group.file}, row {group.first_row + row}") for row in inside]
        assert whole == actual.rows[places].tolist()
        assert set(whole) == {
            row
            for row in expected
            if names[row] in {f"file-{group.file}, row {group.first_row + i}" for i in range(group.num_rows)}
        }


@pytest.fixture
def repeating(sample):
    """Two files of 23 and 17 rows in row groups of 5; row 9 of the second repeats row 2 of the first, its row
    15 row 3 of its own."""
    rows = [sample.row(i) for i in range(40)]
    rows[23 + 9], rows[23 + 15] = rows[2], rows[23 + 3]
    sample.write(rows[:23], "train/part-0.parquet")
    sample.write(rows[23:], "train/part-1.parquet")
    sample.pipeline.data.train.parquet.paths[:] = [str(sample.folder / "train")]
    return sample


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_key_in_two_files_is_an_error_before_the_first_batch(repeating, world_size, num_workers):
    repeating.pipeline.data.num_workers = num_workers
    folder = repeating.folder / "train"
    for rank in range(world_size):
        with pytest.raises(DataError) as error:
            Loader.open(repeating.pipeline, "train", RULE, rank=rank, world_size=world_size, shuffle=True)
        assert str(error.value) == (
            f"{folder}/part-1.parquet, row 9: has the same user_id = 2 and request_time = 1020 as "
            f"{folder}/part-0.parquet, row 2. Correct the files, or leave such rows out and count them: "
            "data.bad_rows { policy: SKIP }."
        )


@pytest.mark.parametrize("gone", ["request_time", "user_id"])
def test_a_file_without_what_identifies_a_row_is_said_to_be_one(sample, gone):
    """Rows are not compared by what is left: there all requests of a user would be the same."""
    rows = [sample.row(i) | {"user_id": 3} for i in range(4)]
    sample.write(rows, "train/part-0.parquet")
    whole = pq.read_table(sample.folder / "train" / "part-0.parquet")
    pq.write_table(whole.drop([gone]), sample.folder / "train" / "part-1.parquet")
    sample.pipeline.data.train.parquet.paths[:] = [str(sample.folder / "train")]
    with pytest.raises(DataError, match=rf"part-1.parquet: no column {gone}\."):
        Loader.open(sample.pipeline, "train", RULE)
    pq.write_table(pa.table({"id": [1]}), sample.folder / "train" / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1.parquet: no column user_id\."):
        Loader.open(sample.pipeline, "train", RULE)


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_later_ones_are_left_out_and_counted(repeating, world_size, num_workers, split):
    data = repeating.pipeline.data
    data.validation.CopyFrom(data.train)
    data.num_workers = num_workers
    data.bad_rows.policy = pb.BadRows.SKIP
    kept, left_out = [], 0
    for rank in range(world_size):
        loader = Loader.open(
            repeating.pipeline, split, RULE, rank=rank, world_size=world_size, shuffle=split == "train"
        )
        for batch in loader.epoch(1):
            rows = zip(batch.rows.file.tolist(), batch.rows.row.tolist(), batch.sample_weight, strict=True)
            kept += [(file, row) for file, row, weight in rows if weight]
        left_out += loader.counter.counts.left_out
        assert set(loader.counter.by_name) <= {"duplicate_key", "truncated_history"}
    assert sorted(kept) == [(0, i) for i in range(23)] + [(1, i) for i in range(17) if i not in (9, 15)]
    assert left_out == 2


def test_more_than_may_be_left_out_is_an_error(repeating):
    repeating.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    repeating.pipeline.data.bad_rows.limit = 2
    Loader.open(repeating.pipeline, "train", RULE)
    repeating.pipeline.data.bad_rows.limit = 1
    with pytest.raises(
        DataError, match=r"row 9: has the same .* More than data.bad_rows.limit = 1 rows repeat"
    ):
        Loader.open(repeating.pipeline, "train", RULE)


def test_another_key_column_tells_rows_apart(repeating):
    repeating.set_keys("user_id", "age")
    with pytest.raises(
        DataError, match=r"row 9: has the same user_id = 2 and age = 12.0 and request_time = 1020"
    ):
        Loader.open(repeating.pipeline, "train", RULE)
    for number, name in enumerate(("part-0", "part-1")):
        path = repeating.folder / "train" / f"{name}.parquet"
        table = pq.read_table(path)
        column = pa.array([f"{number}-{i // 10}" for i in range(len(table))]).dictionary_encode()
        pq.write_table(table.append_column("request", column), path, row_group_size=5)
    repeating.set_keys("user_id", "request")
    # Within the file rows 3 and 15 differ in `request`, too.
    assert (
        len(
            find_duplicates(
                open_source(repeating.pipeline.data.train, repeating.pipeline), repeating.pipeline
            ).rows
        )
        == 0
    )
    Loader.open(repeating.pipeline, "train", RULE)


def test_who_does_not_look_finds_those_of_a_row_group(repeating, sample):
    repeating.pipeline.data.find_duplicates = False
    assert len(list(Loader.open(repeating.pipeline, "train", RULE).epoch())) > 0
    rows = [sample.row(i) for i in range(10)]
    rows[8] = rows[6]
    sample.write(rows, "other/part.parquet")
    sample.pipeline.data.train.parquet.paths[:] = [str(sample.folder / "other")]
    with pytest.raises(
        DataError, match=r"row 8: has the same user_id = 6 .* as another row, 2 rows before it"
    ):
        list(Loader.open(sample.pipeline, "train", RULE).epoch())


def test_nobody_looks_where_keys_are_unknown_or_made_up(repeating):
    repeating.set_keys()
    assert (
        find_duplicates(open_source(repeating.pipeline.data.train, repeating.pipeline), repeating.pipeline)
        is None
    )
    repeating.set_keys("user_id")
    made_up = pb.Source(synthetic=pb.SyntheticSource(num_rows=3000))
    assert find_duplicates(open_source(made_up, repeating.pipeline), repeating.pipeline) is None
    loader = Loader.open(repeating.pipeline, made_up, RULE)
    assert len(list(islice(loader.epoch(), 3))) == 3


def test_keys_alone_are_counted(repeating):
    source = open_source(repeating.pipeline.data.train, repeating.pipeline)
    assert count_repeated(source, ["user_id"]) == 2
    ages = pq.read_table(repeating.folder / "train" / "part-0.parquet")["age"].to_pylist()
    assert len(set(ages)) == len(ages)


def test_memory_is_bounded_when_every_row_is_the_same(monkeypatch):
    monkeypatch.setattr(duplicates, "_HASHES", 100)
    same = pa.table({"user": [1] * 50, "request_time": [1] * 50})
    largest = 0
    fold = duplicates._fold

    def watched(hashes):
        nonlocal largest
        largest = max(largest, len(hashes))
        return fold(hashes)

    monkeypatch.setattr(duplicates, "_fold", watched)
    source = Tables([[same] * 200])
    actual = duplicates._Search(source, ["user", "request_time"], limit=3).run()
    assert actual.rows.tolist() == [1, 2, 3] and actual.firsts.tolist() == [0, 0, 0]
    assert largest <= 200
