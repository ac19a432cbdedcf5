"""Cells of `recsys.prepare csv`: lists, conditions and fills, each against a loop over the lines."""

import csv
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import config
from recsys.prepare import __main__ as command

BASE = ["--user-column", "who", "--item-column", "sku", "--time-column", "ts"]
RANKING = [
    *BASE, "--task", "ranking", "--label", "liked=rating>=4", "--label", "bought=event==purchase",
    "--label", "stars=rating:regression", "--action", "cart=event!=view", "--action", "low=rating<2",
    "--action", "any=price", "--item-list", "tags", "--user-list", "groups", "--item-number", "price",
    "--fill", "price=0.5", "--fill", "rating=3", "--fill", "event=view",
]  # fmt: skip


def made_up_log() -> list[dict[str, str]]:
    generator = random.Random(0)
    return [
        {
            "who": f"u{number % 7}",
            "sku": str(generator.randrange(20)),
            "ts": str(1_700_000_000 + 100 * number),
            "rating": generator.choice(["1", "2.5", "4", "5", ""]),
            "event": generator.choice(["view", "cart", "purchase", ""]),
            "tags": generator.choice(["3|12", " 3 | 7 ", "", "7||3", "12"]),
            "groups": f"g{number % 7}|all",
            "price": generator.choice(["", "2", "0"]),
        }
        for number in range(210)
    ]


LINES = made_up_log()


def prepare(folder: Path, lines: list[dict[str, str]], *flags: str) -> int:
    source = folder / "log.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return prepared(source, folder / "made", *flags)


def prepared(source: Path, folder: Path, *flags: str) -> int:
    return command.main(["csv", "--input", str(source), "--output", str(folder), *flags])


def by_hand(line: dict[str, str]) -> dict[str, object]:
    """The row that one line becomes."""
    stars, event = float(line["rating"] or 3), line["event"] or "view"
    price = float(line["price"] or 0.5)
    return {
        "liked": float(stars >= 4),
        "bought": float(event == "purchase"),
        "stars": stars,
        "actions": (event != "view") + 2 * (stars < 2) + 4 * (price > 0),
        "tags": [int(tag) for tag in line["tags"].split("|") if tag.strip()],
        "price": price,
    }


@pytest.mark.parametrize("part_rows", ["1000000", "60"])
def test_lists_conditions_and_fills_are_what_a_loop_says(tmp_path, part_rows):
    assert prepare(tmp_path, LINES, *RANKING, "--part-rows", part_rows) == 0
    made = {int(line["ts"]): by_hand(line) for line in LINES}
    seen = 0
    for split in ("train", "validation", "test"):
        for row in pq.read_table(tmp_path / "made" / split).to_pylist():
            lines = [made[time] for time in row["candidate_timestamps"]]
            for name in ("liked", "bought", "stars", "tags", "price"):
                assert row[f"candidate_{name}"] == [line[name] for line in lines]
            events = [made[time] for time in row["uih_timestamps"]]
            assert row["uih_actions"] == [event["actions"] for event in events]
            assert row["uih_tags"] == [event["tags"] for event in events]
            assert row["groups"] == [f"g{row['user_id'][1:]}", "all"]
            seen += len(lines)
    assert seen == len(LINES)
    ids = pq.read_table(tmp_path / "made" / "vocabulary" / "tags.parquet")["id"].to_pylist()
    assert sorted(ids) == [3, 7, 12]
    described = json.loads((tmp_path / "made" / "schema.json").read_text())["input_columns"]
    assert described["candidate_liked"] == "rating>=4" and described["action cart"] == "event!=view"
    resolved = config.resolve(config.load(tmp_path / "made" / "starter.config")).pipeline
    assert config.check(resolved) == []


def test_lists_of_a_catalogue_are_those_of_the_last_event(tmp_path):
    flags = [*BASE, "--task", "retrieval", "--item-list", "tags", "--list-delimiter", "|"]
    assert prepare(tmp_path, LINES, *flags) == 0
    last = {int(line["sku"]): by_hand(line)["tags"] for line in LINES}
    items = pq.read_table(tmp_path / "made" / "items.parquet").to_pylist()
    assert {item["item_id"]: item["tags"] for item in items} == last


@pytest.mark.parametrize("element", [pa.int64(), pa.string()])
@pytest.mark.parametrize("wrap", [pa.list_, pa.large_list, lambda element: pa.list_(element, 2)])
def test_lists_of_a_parquet_file_are_those_of_a_text_file(tmp_path, element, wrap):
    """Two categories a cell, so that lists of a fixed size can hold them."""
    lines = [{**line, "tags": f"{n % 5} | {5 + n % 3}"} for n, line in enumerate(LINES)]
    flags = [*BASE, "--task", "retrieval", "--item-list", "tags"]
    (tmp_path / "text").mkdir()
    assert prepare(tmp_path / "text", lines, *flags) == 0
    cells = [[text.strip() for text in line["tags"].split("|")] for line in lines]
    table = pa.Table.from_pylist(lines).drop(["tags"])
    column = pa.array(cells).cast(pa.list_(element)).cast(wrap(element))
    pq.write_table(table.append_column("tags", column), tmp_path / "log.parquet")
    assert prepared(tmp_path / "log.parquet", tmp_path / "made", *flags) == 0
    for name in ("items.parquet", "train/part-00000.parquet", "latest/part-00000.parquet"):
        assert pq.read_table(tmp_path / "made" / name) == pq.read_table(tmp_path / "text" / "made" / name)


def test_lists_of_a_parquet_file_hold_nulls_and_no_delimiter(tmp_path, capsys):
    cells = [["a", None], None, [], *[["b"]] * (len(LINES) - 3)]
    table = pa.Table.from_pylist(LINES).drop(["tags"])
    log, flags = tmp_path / "log.parquet", [*BASE, "--task", "retrieval"]
    pq.write_table(table.append_column("tags", pa.array(cells)), log)
    assert prepared(log, tmp_path / "made", *flags, "--item-list", "tags") == 0
    ids = pq.read_table(tmp_path / "made" / "vocabulary" / "tags.parquet")["id"].to_pylist()
    assert sorted(ids) == ["a", "b"]
    assert prepared(log, tmp_path / "no", *flags, "--item-feature", "tags") == 3
    assert "lists of texts or integers are for --item-list and --user-list" in capsys.readouterr().err
    cells[7] = ["b", "c|d"]
    pq.write_table(table.append_column("tags", pa.array(cells)), log)
    assert prepared(log, tmp_path / "no", *flags, "--item-list", "tags") == 3
    assert f"{log}, row 7: a category of tags holds '|', which stands between" in capsys.readouterr().err
    more = ["--item-list", "tags", "--list-delimiter", ";"]
    assert prepared(log, tmp_path / "other", *flags, *more) == 0
    assert "c|d" in pq.read_table(tmp_path / "other/vocabulary/tags.parquet")["id"].to_pylist()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            ["--label", "x=rating=>4"],
            2,
            "--label ...=rating=>4: => is not a comparison sign; did you mean >=?",
        ),
        (["--label", "x=rating>=high"], 2, "--label ...=rating>=high: 'high' is not a number"),
        (["--label", "x=rating>=4:regression"], 2, "leave out :regression"),
        (["--label", "x=rating>=4"], 3, "rating is '', expected a number; --fill rating=VALUE says what"),
        (["--label", "x=event>=4", "--fill", "event=view"], 3, "line 2: event is 'view', expected a number"),
        (["--label", "x=ratings>=4"], 3, "no column ratings (did you mean rating?)"),
        (["--label", "x=event==cart", "--item-number", "price"], 3, "price is '', expected a number"),
    ],
)
def test_conditions_that_cannot_be_are_named(tmp_path, capsys, flags, code, message):
    lines = [{**LINES[0], "event": "view", "rating": "4", "price": "1"}, *LINES]
    assert prepare(tmp_path, lines, *BASE, "--task", "ranking", *flags) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_help_shows_defaults(capsys):
    with pytest.raises(SystemExit):
        command.main(["csv", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for default in (
        "unit of times since 1970, or dates as text (default: s)",
        "(default: 0.1)",
        "(default: |)",
    ):
        assert default in shown
    assert "default: None" not in shown and "default: []" not in shown
