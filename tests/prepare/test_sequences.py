"""`recsys.prepare sequences` on a log written as sequences; cores and items of both tools that read logs."""

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys.prepare import __main__ as command
from tests.prepare.test_csv import BASE, LINES, RANKING, RETRIEVAL, by_user, prepare, rows, write


def prepare_sequences(source: Path, target: Path, *arguments: str) -> int:
    return command.main(["sequences", "--input", str(source), "--output", str(target), *arguments])


def core_by_hand(lines, fewest):
    """The largest part of a log in which every user and every item has `fewest` events."""
    while True:
        users = [line["who"] for line in lines]
        kept = [line for line in lines if users.count(line["who"]) >= fewest]
        items = [line["sku"] for line in kept]
        kept = [line for line in kept if items.count(line["sku"]) >= fewest]
        if len(kept) == len(lines):
            return lines
        lines = kept


@pytest.mark.parametrize("part_rows", ["1000000", "40"])
def test_a_core_keeps_users_and_items_with_enough_events(tmp_path, part_rows):
    core = core_by_hand(LINES, 6)
    assert 0 < len(core) < len(LINES)
    flags = ["--min-user-events", "6", "--min-item-events", "6", "--part-rows", part_rows]
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "made", *RETRIEVAL, *flags) == 0
    assert prepare(write(tmp_path / "core.csv", core), tmp_path / "core", *RETRIEVAL) == 0
    for split in ("train", "validation", "test"):
        assert rows(tmp_path / "made", split) == rows(tmp_path / "core", split)
    actual, expected = (
        pq.read_table(tmp_path / name / "vocabulary" / "item_id.parquet") for name in ("made", "core")
    )
    assert actual == expected and len(actual) < 40


def test_nothing_left_of_a_core_is_an_error(tmp_path, capsys):
    flags = ["--min-user-events", "8", "--min-item-events", "100"]
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "made", *RETRIEVAL, *flags) == 3
    assert "no item is left that has 100 events of users with 8; lower" in capsys.readouterr().err
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "made", *RANKING, *flags) == 2
    assert "are for --task retrieval" in capsys.readouterr().err


def test_items_are_described_as_in_their_last_event(tmp_path):
    flags = ["--item-number", "price", "--part-rows", "40"]
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "made", *RETRIEVAL, *flags) == 0
    last = {}
    for _, line in sorted(enumerate(LINES), key=lambda numbered: (int(numbered[1]["ts"]), numbered[0])):
        last[int(line["sku"])] = (line["brand"], pytest.approx(float(line["price"])))
    actual = pq.read_table(tmp_path / "made" / "items.parquet").to_pylist()
    assert {item["item_id"]: (item["brand"], item["price"]) for item in actual} == last and len(
        actual
    ) == len(last)
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "ids", *BASE, "--task", "retrieval") == 0
    assert not (tmp_path / "ids" / "items.parquet").exists()


def as_sequences(folder: Path) -> tuple[Path, Path]:
    """The log as two files with a line a user."""
    items, times = folder / "items.txt", folder / "times.txt"
    users = by_user()
    items.write_text(
        "".join(f"{who} {' '.join(e['sku'] for e in events)}\n" for who, events in users.items())
    )
    times.write_text(
        "".join(f"{who} {' '.join(str(e['ts']) for e in events)}\n" for who, events in users.items())
    )
    return items, times


@pytest.mark.parametrize("part_rows", ["1000000", "40"])
def test_sequences_are_the_log_that_they_were_made_of(tmp_path, part_rows):
    items, times = as_sequences(tmp_path)
    flags = ["--times", str(times), "--part-rows", part_rows]
    assert prepare_sequences(items, tmp_path / "made", *flags) == 0
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "log", *BASE, "--task", "retrieval") == 0
    for split in ("train", "validation", "test", "latest"):
        assert rows(tmp_path / "made", split) == rows(tmp_path / "log", split)
    inputs = json.loads((tmp_path / "made" / "schema.json").read_text())["inputs"]
    assert [entry["name"] for entry in inputs] == ["items.txt", "times.txt"]


def test_sequences_without_times_keep_their_order(tmp_path):
    items, _ = as_sequences(tmp_path)
    with gzip.open(tmp_path / "items.txt.gz", "wb") as file:
        file.write(items.read_bytes())
    assert prepare_sequences(tmp_path / "items.txt.gz", tmp_path / "made") == 0
    actual = {row["user_id"]: row for row in rows(tmp_path / "made", "test")}
    for user, events in by_user().items():
        assert actual[user]["uih_item_id"] == [int(line["sku"]) for line in events[:-1]]
        assert actual[user]["uih_timestamps"] == list(range(1, len(events)))


@pytest.mark.parametrize(
    ("items", "times", "message"),
    [
        ("a 1 2 3\nb 4 5\n", "a 1 2 3\nb 1\n", "times.txt, line 2: user b with 1 events, but "),
        ("a 1 2 3\nb 4 5\n", "a 1 2 3\n", "times.txt, line 2: no user, but "),
        ("a 1 2 3\nb 4 5\n", "a 1 2 3\nc 1 2\n", "times.txt, line 2: user c with 2 events, but "),
        ("a 1 2 3\nb 4 5\n", "a 1 2 3\nb 1 x\n", "items.txt, line 2: time is 'x', expected a time in s"),
    ],
)
def test_sequences_and_times_that_do_not_fit_are_named(tmp_path, capsys, items, times, message):
    (tmp_path / "items.txt").write_text(items)
    (tmp_path / "times.txt").write_text(times)
    flags = ["--times", str(tmp_path / "times.txt")]
    assert prepare_sequences(tmp_path / "items.txt", tmp_path / "made", *flags) == 3
    assert message in capsys.readouterr().err


def test_a_core_of_sequences_is_the_core_of_the_log(tmp_path):
    items, times = as_sequences(tmp_path)
    core = ["--min-user-events", "6", "--min-item-events", "6"]
    assert prepare_sequences(items, tmp_path / "made", "--times", str(times), *core) == 0
    flags = [*BASE, "--task", "retrieval", *core]
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "log", *flags) == 0
    assert rows(tmp_path / "made", "train") == rows(tmp_path / "log", "train")


def test_the_columns_of_a_log_are_flags_that_must_be_given(tmp_path, capsys):
    for tool, flags, message in (
        (prepare, ["--task", "retrieval", "--user-column", "who"], "required: --item-column, --time-column"),
        (prepare_sequences, ["--user-column", "who"], "unrecognized arguments: --user-column who"),
        (prepare_sequences, ["--time", "x"], "unrecognized arguments: --time x. Did you mean --times?"),
    ):
        with pytest.raises(SystemExit) as stopped:
            tool(tmp_path / "items.txt", tmp_path / "made", *flags)
        assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_an_empty_file_of_sequences_is_named(tmp_path, capsys):
    (tmp_path / "items.txt").write_text("a\n\n")
    assert prepare_sequences(tmp_path / "items.txt", tmp_path / "made") == 3
    assert "items.txt: no events" in capsys.readouterr().err


@pytest.mark.parametrize("tool", command.TOOLS)
def test_every_tool_explains_itself_under_its_own_name(tool, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([tool, "--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and shown.startswith(f"usage: python -m recsys.prepare {tool} ")
    assert f"\n    python -m recsys.prepare {tool} --input" in shown


def test_a_tool_that_is_none_is_a_usage_error(capsys):
    for arguments in ([], ["cvs"]):
        with pytest.raises(SystemExit) as stopped:
            command.main(arguments)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.startswith("python -m recsys.prepare: ")
