"""Labels that are bits of a column, from files to batches; tasks that share a column."""

import random

import pyarrow as pa
import pytest

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.data.schema.contract import check_schema
from recsys.errors import DataError

RULE = LayoutRule(num_contextual=2, targets=True)
BITS = {"like": [1], "share": [0, 5], "rare": [62, 1]}
MASKS = "candidate_actions"


@pytest.fixture
def tasks(sample):
    """Three tasks that read bits of one column, beside those of the sample."""
    for name, bits in BITS.items():
        loss = pb.Loss(jrc={}) if name == "like" else pb.Loss(focal={})
        sample.pipeline.model.ranker.tasks.add(name=name, label=MASKS, label_bits=bits, loss=loss)
    return sample


def rows_with_masks(sample, count: int) -> list[dict]:
    draw = random.Random(7)
    rows = sample.rows(count)
    for row in rows:
        row[MASKS] = [
            sum(1 << bit for bit in (0, 1, 5, 9, 62) if draw.random() < 0.3) for _ in row["candidate_item_id"]
        ]
    return rows


def write(sample, rows: list[dict], kind=None, path="train.parquet"):
    kind = kind or pa.int64()
    return sample.write(rows, path, schema=sample.schema.append(pa.field(MASKS, pa.list_(kind))))


def load(sample, source="train", mode="evaluate"):
    return list(Loader.open(sample.pipeline, source, RULE, mode=mode).epoch(0))


def labels_of(batches, task: str) -> list[float]:
    """In the order of the file's rows."""
    results = {}
    for batch in batches:
        parts = batch.labels[task].split(batch.num_candidates.tolist())
        results |= dict(zip(batch.rows.row.tolist(), parts, strict=True))
    return [label for row in sorted(results) for label in results[row].tolist()]


def test_from_a_parquet_file_to_the_batch(tasks):
    rows = rows_with_masks(tasks, 30)
    write(tasks, rows)
    batches = load(tasks)
    masks = [mask for row in rows for mask in row[MASKS]]
    for name, bits in BITS.items():
        expected = [float(any(mask >> bit & 1 for bit in bits)) for mask in masks]
        assert labels_of(batches, name) == expected
        assert 0 < sum(expected) < len(expected)
    assert labels_of(batches, "is_click") == [float(x) for row in rows for x in row["candidate_is_click"]]
    assert all(batch.labels["rare"].dtype == batch.labels["watch"].dtype for batch in batches)


def test_candidates_that_are_cut_lose_their_labels(tasks):
    rows = rows_with_masks(tasks, 30)
    tasks.pipeline.data.max_candidates = 1
    write(tasks, rows)
    expected = [float(row[MASKS][0] >> 1 & 1) for row in rows if row[MASKS]]
    assert labels_of(load(tasks), "like") == expected


def test_from_a_csv_file(tasks):
    del tasks.pipeline.features[2]
    rows = [
        {name: value for name, value in row.items() if "tags" not in name}
        for row in rows_with_masks(tasks, 20)
    ]
    cells = [["|".join(map(str, x)) if isinstance(x, list) else str(x) for x in row.values()] for row in rows]
    path = tasks.folder / "rows.csv"
    path.write_text("\n".join(",".join(row) for row in [list(rows[0]), *cells]) + "\n")
    actual = load(tasks, pb.Source(csv=pb.CsvSource(paths=[str(path)])))
    expected = [float(any(mask >> bit & 1 for bit in (62, 1))) for row in rows for mask in row[MASKS]]
    assert labels_of(actual, "rare") == expected


def test_synthetic_rows_set_every_bit(tasks):
    batches = load(tasks, pb.Source(synthetic=pb.SyntheticSource(num_rows=300, max_history_len=3)))
    for name, bits in BITS.items():
        actual = labels_of(batches, name)
        assert sum(actual) / len(actual) == pytest.approx(1 - 0.5 ** len(bits), abs=0.08)


def test_prediction_does_not_look_at_masks(tasks):
    tasks.write(tasks.rows(6))
    assert load(tasks, mode="predict")[0].labels == {}


@pytest.mark.parametrize("kind", [pa.float64(), pa.bool_(), pa.string()])
def test_masks_are_integers(tasks, kind):
    schema = tasks.schema.append(pa.field(MASKS, pa.list_(kind)))
    with pytest.raises(DataError, match=f"column {MASKS} is list<.*>; it must be list of int64"):
        check_schema(schema, tasks.pipeline, "train", "a.parquet")


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (-1, pa.int64(), "is -1; masks of labels are 0 or larger"),
        (2**63, pa.uint64(), f"is {2**63}, more than int64 holds"),
        (None, pa.int64(), "is null"),
    ],
)
def test_a_mask_that_is_none(tasks, value, kind, message):
    rows = rows_with_masks(tasks, 9)
    rows[4][MASKS][0] = value
    write(tasks, rows, kind)
    with pytest.raises(DataError, match=rf"row 4: {MASKS}\[0\] {message}"):
        load(tasks)
    tasks.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    left_out = [batch.rows.row[batch.sample_weight == 0].tolist() for batch in load(tasks)]
    assert sum(left_out, []) == [4]


@pytest.mark.parametrize("binary_first", [False, True])
def test_a_shared_column_obeys_every_task(sample, binary_first):
    """Seconds for one task, a label of 0 or 1 for another."""
    tasks = sample.pipeline.model.ranker.tasks
    binary = pb.Task(name="watched", label="candidate_seconds", loss=pb.Loss(pairwise={}))
    tasks.insert(0, binary) if binary_first else tasks.append(binary)
    rows = sample.rows(9)
    for row in rows:
        row["candidate_seconds"] = [1.0] * len(row["candidate_seconds"])
    sample.write(rows)
    assert set(labels_of(load(sample), "watched")) == set(labels_of(load(sample), "watch")) == {1.0}
    rows[4]["candidate_seconds"][0] = 1.5
    sample.write(rows)
    with pytest.raises(DataError, match=r"row 4: candidate_seconds\[0\] is 1.5; a binary task"):
        load(sample)
