"""Mappings from values to table rows, against dictionaries and loops."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import protos as pb
from recsys.data.arrow import is_text
from recsys.data.schema.vocabulary import Buckets, HashBuckets, Vocabulary, id_type, mappings, normalize
from recsys.errors import DataError


def int_ids(count: int, spread: int) -> list[int]:
    return np.random.default_rng(1).choice(spread, count, replace=False).tolist()


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [5],
        int_ids(1000, 1500),  # nearly without gaps
        int_ids(5000, 10**15),
        [0, 2**63 - 1],
        [f"item-{i}" for i in int_ids(3000, 10**9)],
        ["", "a", "a\0", "a" * 30],
    ],
    ids=["empty", "one", "dense", "sparse", "extremes", "text", "odd text"],
)
def test_rows_and_back(monkeypatch, ids):
    text = bool(ids) and isinstance(ids[0], str)
    vocabulary = Vocabulary(pa.array(ids, pa.string() if text else pa.int64()), name="v")
    known = {value: i + 1 for i, value in enumerate(ids)}
    strangers = ["b", "item-", "é"] if text else [1, 10**15 + 7, 4]
    # Most frequent ids come often, and every id at least once.
    queries = [*ids, *ids[:50] * 3, *strangers]
    np.random.default_rng(2).shuffle(queries)
    rows = vocabulary.map(pa.array(queries, pa.string() if text else pa.int64()))
    assert rows.tolist() == [known.get(query, 0) for query in queries]
    # A few ids are looked up one by one, in a dictionary that begins anew when it is full.
    monkeypatch.setattr("recsys.data.schema.vocabulary._KEPT", 100)
    pieces = [
        vocabulary.map(pa.array(queries[i : i + 60], vocabulary.ids.type), np.int32)
        for i in range(0, len(queries), 60)
    ]
    assert np.concatenate(pieces).tolist() == rows.tolist() and pieces[0].dtype == np.int32
    assert len(vocabulary._looked_up) <= 100
    assert rows.dtype == np.int64 and len(vocabulary) == len(ids) and vocabulary.rows == len(ids) + 1
    back = vocabulary.original(rows).to_pylist()
    assert back == [query if query in known else None for query in queries]


def test_no_values():
    assert Vocabulary(pa.array([3, 4]), name="v").map(pa.array([], pa.int64())).tolist() == []
    assert Vocabulary(pa.array(["a"]), name="v").map(pa.array([], pa.string())).tolist() == []


def test_narrow_integers_are_the_same_ids():
    vocabulary = Vocabulary(pa.array([300, 7], pa.int32()), name="v")
    assert vocabulary.map(pa.array([7, 300, 8], pa.uint16())).tolist() == [2, 1, 0]


def test_more_ids_than_the_table_in_front_has_places(monkeypatch):
    monkeypatch.setattr("recsys.data.schema.id_search._FRONT_BITS", 4)
    ids = int_ids(500, 10**12)
    vocabulary = Vocabulary(pa.array(ids), name="v")
    assert vocabulary.map(pa.array([*ids[::-1], 1])).tolist() == [*range(500, 0, -1), 0]


def test_two_texts_with_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr("recsys.data.schema.vocabulary.hash_text", lambda a: np.full(len(a), 9, np.uint64))
    vocabulary = Vocabulary(pa.array(["a"]), name="v")
    assert vocabulary.map(pa.array(["b", "a", "a"])).tolist() == [0, 1, 1]
    with pytest.raises(DataError, match="ids 'a' and 'b' are the same, or the same to the hash"):
        Vocabulary(pa.array(["a", "b"]), name="v")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (pa.array([1, 2, 1]), r"^v: ids 1 and 1 are the same"),
        (pa.array(["x", "y", "x"]), r"^v: ids 'x' and 'x' are the same"),
        (pa.array([1, None]), r"^v: `id` has 1 nulls"),
        (pa.array([1, 2**63], pa.uint64()), r"^v: an `id` does not fit int64 \(.*9223372036854775808"),
        (pa.array([1.5]), r"^v: `id` is double; allowed are integers and strings"),
    ],
)
def test_unusable_ids(ids, message):
    with pytest.raises(DataError, match=message):
        Vocabulary(ids, name="v")


def test_a_file(tmp_path):
    path = tmp_path / "item.parquet"
    pq.write_table(pa.table({"id": [9, 8, 7], "count": [3, 2, 1]}), path)
    assert Vocabulary.read(str(path)).map(pa.array([7, 9])).tolist() == [3, 1]
    assert len(Vocabulary.read(str(path), 3)) == 3
    with pytest.raises(DataError, match=r"it has 3 ids, the config says 4 \(vocabulary.size\)"):
        Vocabulary.read(str(path), 4)


@pytest.mark.parametrize("text", [False, True])
def test_a_file_of_narrow_or_dictionary_encoded_ids(tmp_path, text):
    path = str(tmp_path / "item.parquet")
    ids = pa.array(["b", "a"]).dictionary_encode() if text else pa.array([9, 8], pa.uint32())
    pq.write_table(pa.table({"id": ids}), path)
    asked = pa.array(["a", "b", "c"] if text else [8, 9, 10])
    assert Vocabulary.read(path).map(asked).tolist() == [2, 1, 0]
    assert is_text(id_type(path)) == text


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="no such vocabulary file"):
        Vocabulary.read(str(tmp_path / "none.parquet"))
    with pytest.raises(DataError, match=r"a vocabulary has no file. Set data.vocabulary_dir"):
        Vocabulary.read("")
    path = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"id": list(range(1000))}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cut.parquet: not a complete parquet file"):
        Vocabulary.read(str(path))
    pq.write_table(pa.table({"ident": [1]}), path)
    with pytest.raises(DataError, match="it has no column `id`, only ident"):
        Vocabulary.read(str(path))


def test_hash_buckets_are_fixed_for_ever():
    # A trained table is only worth something as long as these do not change; from the loops in test_hashing.
    assert HashBuckets(1000).map(pa.array([0, 1, 2, 10**18])).tolist() == [883, 566, 591, 603]
    assert HashBuckets(1000).map(pa.array(["", "user-1", "a much longer name"])).tolist() == [883, 867, 804]


def test_a_number_has_the_bucket_of_its_text():
    numbers = [0, 7, -7, 10**18 - 1, 1 - 10**18, *range(10_000, 10_050)]
    texts = pa.array([str(number) for number in numbers])
    big = HashBuckets(2**30)
    assert big.map(texts).tolist() == big.map(pa.array(numbers)).tolist()
    # Other ways to write a number are other texts, and what no int64 holds is a text.
    others = ["07", "+7", "7.0", " 7", "-0", "7" * 40]
    assert len(set(big.map(pa.array([*others, "7"])).tolist())) == 7


def test_hash_buckets_are_used_evenly():
    counts = np.bincount(HashBuckets(50).map(pa.array(range(100_000))), minlength=50)
    # 2000 each, with a standard deviation of sqrt(2000) = 45.
    assert abs(counts - 2000).max() < 5 * 45


def test_a_bucket_holds_its_lower_limit():
    limits, values = [1.0, 2.5, 10.0], [-5, 1, 0.999, 2.5, 2.49, 10, 1e9]
    expected = [sum(limit <= value for limit in limits) for value in values]
    assert Buckets(limits).map(np.array(values)).tolist() == expected == [0, 1, 0, 2, 1, 3, 3]


@pytest.mark.parametrize("log1p", [False, True])
def test_normalize(log1p):
    values = [0.0, 3.0, -7.5, 1e12]
    config = pb.Normalize(mean=2, std=0.5, log1p=log1p)

    def f(x: float) -> float:
        return math.copysign(math.log(1 + abs(x)), x) if log1p else x

    np.testing.assert_allclose(
        normalize(np.array(values), config), [(f(x) - 2) / 0.5 for x in values], rtol=1e-6
    )


def test_tables_that_features_share(sample):
    actual = mappings(sample.pipeline)
    assert {name: (type(mapping).__name__, mapping.rows) for name, mapping in actual.items()} == {
        "user": ("HashBuckets", 97),
        "item": ("Vocabulary", 7),
        "tags": ("HashBuckets", 11),
        "age": ("Buckets", 4),
    }
