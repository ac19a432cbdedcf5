"""CSV files give the rows that the same table gives as parquet."""

import pytest

from recsys import protos as pb
from recsys.data.batch import LayoutRule
from recsys.data.loader import Loader
from recsys.data.sources import open_source
from recsys.errors import DataError

RULE = LayoutRule(num_contextual=2, targets=True)


def write_csv(path, rows: list[dict], delimiter: str = ",", between: str = "|"):
    def cell(value) -> str:
        return (
            between.join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        )

    lines = [delimiter.join(rows[0])] + [
        delimiter.join(cell(value) for value in row.values()) for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def plain(sample):
    """The sample without the feature that has lists in lists."""
    del sample.pipeline.features[2]
    sample.plain_rows = [{k: v for k, v in row.items() if "tags" not in k} for row in sample.rows(20)]
    return sample


def csv(path, **settings):
    return pb.Source(csv=pb.CsvSource(paths=[str(path)], **settings))


@pytest.mark.parametrize(("delimiter", "between"), [(",", "|"), ("\t", ";")])
def test_the_same_batches_as_from_parquet(plain, delimiter, between):
    # A feature of a CSV file is text, and so is a key that is one: its groups would have other numbers.
    plain.set_keys("request_time")
    plain.write(plain.rows(20))
    path = write_csv(plain.folder / "rows.csv", plain.plain_rows, delimiter, between)
    source = csv(path, delimiter=delimiter, list_delimiter=between)
    (first, second) = (
        list(Loader.open(plain.pipeline, split, RULE, mode="evaluate").epoch(0))
        for split in (plain.pipeline.data.train, source)
    )
    rows = [{}, {}]
    for actual, batches in zip(rows, (first, second), strict=True):
        for batch in batches:
            start = 0
            for i, row in enumerate(batch.rows.row.tolist()):
                events = int(batch.uih_lengths[i])
                items = batch.ids["uih_item_id"].to_dense()[i].tolist()
                times = batch.uih_timestamps[start : start + events].tolist()
                user = batch.ids["user_id"].to_dense()[i].tolist()
                actual[row] = (user, items, times, int(batch.request_time[i]), int(batch.group[i]))
                start += events
    assert rows[0] == rows[1] and len(rows[0]) == 20


def test_a_text_feature_of_digits_stays_text(plain):
    path = write_csv(plain.folder / "rows.csv", plain.plain_rows)
    table = open_source(csv(path), plain.pipeline).read(0, 0, ["user_id", "uih_item_id", "age"])
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert kinds["user_id"] == "string" and kinds["age"] == "double" and "int64" in kinds["uih_item_id"]


def test_runs_of_rows_are_row_groups(plain):
    rows = [dict(plain.plain_rows[1], user_id=i) for i in range(2500)]
    opened = open_source(csv(write_csv(plain.folder / "rows.csv", rows)), plain.pipeline)
    assert opened.files[0].rows == (1024, 1024, 452)
    assert opened.read(0, 2, ["user_id"])["user_id"].to_pylist() == [str(i) for i in range(2048, 2500)]


def test_empty_fields(plain):
    rows = plain.plain_rows[:2]
    rows[1].update(uih_item_id=[], uih_timestamps=[], uih_actions=[], uih_watch_time=[], age=None)
    opened = open_source(csv(write_csv(plain.folder / "rows.csv", rows)), plain.pipeline)
    assert opened.read(0, 0, ["uih_item_id", "age"]).to_pylist()[1] == {"uih_item_id": [], "age": None}


@pytest.mark.parametrize(("keys", "expected"), [([], ""), (["user_id"], None)])
def test_an_empty_text_is_an_unknown_id_but_no_key(plain, keys, expected):
    plain.set_keys(*keys)
    plain.plain_rows[1]["user_id"] = None
    opened = open_source(csv(write_csv(plain.folder / "rows.csv", plain.plain_rows[:2])), plain.pipeline)
    assert opened.read(0, 0, ["user_id"])["user_id"].to_pylist() == ["0", expected]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("request_time", "noon", r"rows.csv, row 3: request_time is 'noon'; it must be int64"),
        ("uih_item_id", ["7", "x7"], r"rows.csv, row 3: uih_item_id is 'x7'; it must be int64"),
        ("age", "old", r"rows.csv, row 3: age is 'old'; it must be double"),
    ],
)
def test_a_field_of_another_type(plain, column, value, message):
    plain.plain_rows[3][column] = value
    with pytest.raises(DataError, match=message):
        open_source(csv(write_csv(plain.folder / "rows.csv", plain.plain_rows)), plain.pipeline)


def test_a_line_with_another_number_of_fields(plain):
    path = write_csv(plain.folder / "rows.csv", plain.plain_rows)
    path.write_text(path.read_text() + "1,2,3\n")
    with pytest.raises(DataError, match=r"rows.csv: cannot be parsed .*Check csv.delimiter"):
        open_source(csv(path), plain.pipeline)


def test_lists_in_lists_need_parquet(sample):
    path = sample.folder / "rows.csv"
    path.write_text("a\n1\n")
    with pytest.raises(
        DataError, match="column uih_tags has lists in lists, which a CSV file cannot hold. Use parquet"
    ):
        open_source(csv(path), sample.pipeline)


def test_a_file_that_changed(plain):
    path = write_csv(plain.folder / "rows.csv", plain.plain_rows)
    opened = open_source(csv(path), plain.pipeline)
    opened.read(0, 0, ["age"])
    fresh = open_source(csv(path), plain.pipeline)
    assert fresh.files[0].fingerprint == opened.files[0].fingerprint
    write_csv(path, plain.plain_rows[1:])
    with pytest.raises(DataError, match="rows.csv: it changed while it was read"):
        fresh.read(0, 0, ["age"])
