"""`recsys.prepare csv` on made-up logs: rows against a loop, every input form, parts, times, and what it
refuses."""

import csv
import gzip
import json
import random
import re
from datetime import datetime, timezone
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys import config
from recsys.data.validation import compare_with_files
from recsys.prepare import __main__ as command
from recsys.prepare.events import _microseconds
from recsys.prepare.log_columns import Piece

COLUMNS = ("who", "sku", "ts", "clicked", "dwell", "brand", "price", "age")
BASE = ["--user-column", "who", "--item-column", "sku", "--time-column", "ts"]
RANKING = [
    *BASE, "--task", "ranking", "--label", "click=clicked", "--label", "seconds=dwell:regression",
    "--action", "click=clicked", "--action", "stayed=dwell", "--watch-time-column", "dwell",
    "--item-feature", "brand", "--item-number", "price", "--user-feature", "age", "--session-gap", "20",
    "--max-candidates", "3", "--max-history", "4", "--validation-share", "0.2", "--test-share", "0.2",
]  # fmt: skip
RETRIEVAL = [*BASE, "--task", "retrieval", "--action", "click=clicked", "--item-feature", "brand"]


def made_up_log(count=300):
    """Lines in the order of the file, which is not that of time."""
    generator = random.Random(0)
    lines = []
    for _ in range(count):
        lines.append(
            {
                "who": f"u{generator.randrange(25)}",
                "sku": str(generator.randrange(40)),
                "ts": str(1_700_000_000 + generator.randrange(4000)),
                "clicked": generator.choice(["0", "1"]),
                "dwell": generator.choice(["0", "1.5", "30"]),
                "brand": generator.choice(["acme", "büro", ""]),
                "price": f"{generator.random():.3f}",
                "age": generator.choice(["young", "old"]),
            }
        )
    return lines


LINES = made_up_log()


def write(path: Path, lines=LINES, delimiter=",") -> Path:
    opened = gzip.open(path, "wt", newline="") if path.suffix == ".gz" else open(path, "w", newline="")
    with opened as file:
        writer = csv.DictWriter(file, list(lines[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(lines)
    return path


def prepare(source: Path, target: Path, *arguments: str) -> int:
    return command.main(["csv", "--input", str(source), "--output", str(target), *arguments])


def rows(folder, split):
    """Rows of all parts, in an order of their own."""
    results = []
    for path in sorted((folder / split).glob("*.parquet")):
        results += pq.read_table(path, page_checksum_verification=True).to_pylist()
    return sorted(results, key=lambda row: (row["user_id"], row.get("request_id", 0)))


def by_user(lines=LINES):
    users = {}
    for number, line in enumerate(lines):
        users.setdefault(line["who"], []).append({**line, "number": number, "ts": int(line["ts"])})
    for events in users.values():
        events.sort(key=lambda line: line["ts"])
    return users


def split_of(line, bounds):
    return ("train", "validation", "test")[sum(line["ts"] >= bound for bound in bounds)]


def expected_ranking(bounds):
    """Rows by split as the head of the tool describes them; bounds: first seconds of validation and test."""
    made = {"train": [], "validation": [], "test": []}
    for user, events in by_user().items():
        request, was = [], ""
        for line in events:
            split = split_of(line, bounds)
            fits = request and split == was and line["ts"] - request[-1]["ts"] <= 20 and len(request) < 3
            if not fits:
                request = []
                made[split].append((user, request))
            request.append(line)
            was = split
    return {
        split: sorted(
            (expected_row(user, request, bounds) for user, request in requests),
            key=lambda row: (row["user_id"], row["request_id"]),
        )
        for split, requests in made.items()
    }


def expected_row(user, request, bounds):
    split = split_of(request[0], bounds)
    history = [line for line in by_user()[user] if line["ts"] < request[0]["ts"]]
    if split != "train":
        history = [line for line in history if split_of(line, bounds) != split]
    history = history[-4:]
    row = {
        "user_id": user,
        "request_id": request[0]["number"],
        "request_time": request[0]["ts"],
        "age": request[0]["age"],
        "uih_actions": [int(line["clicked"]) + 2 * (float(line["dwell"]) > 0) for line in history],
        "uih_watch_time": [float(line["dwell"]) for line in history],
        "candidate_click": [float(line["clicked"]) for line in request],
        "candidate_seconds": [float(line["dwell"]) for line in request],
    }
    for prefix, lines in (("uih_", history), ("candidate_", request)):
        row[prefix + "item_id"] = [int(line["sku"]) for line in lines]
        row[prefix + "timestamps"] = [line["ts"] for line in lines]
        row[prefix + "brand"] = [line["brand"] for line in lines]
        row[prefix + "price"] = pytest.approx([float(line["price"]) for line in lines])
    return row


@pytest.mark.parametrize("part_rows", ["1000000", "40"])
def test_ranking_rows_are_what_a_loop_says_in_one_part_or_many(tmp_path, part_rows):
    target = tmp_path / "made"
    assert prepare(write(tmp_path / "log.csv"), target, *RANKING, "--part-rows", part_rows) == 0
    schema = json.loads((target / "schema.json").read_text())
    bounds = [min(r["request_time"] for r in rows(target, split)) for split in ("validation", "test")]
    expected = expected_ranking(bounds)
    for split, wanted in expected.items():
        assert rows(target, split) == wanted
        assert (len(schema["splits"][split]["files"]) > 1) == (part_rows == "40")
    times = sorted(int(line["ts"]) for line in LINES)
    assert bounds[0] == pytest.approx(times[180], abs=60) and bounds[1] == pytest.approx(times[240], abs=60)
    train = [brand for row in expected["train"] for brand in row["candidate_brand"]]
    table = pq.read_table(target / "vocabulary" / "brand.parquet").to_pydict()
    assert dict(zip(table["id"], table["count"], strict=True)) == {
        brand: train.count(brand) for brand in ("acme", "büro")
    }


def test_retrieval_rows_leave_one_out_and_the_catalogue_is_every_item(tmp_path):
    lines = [*LINES, *({**LINES[0], "who": "short", "sku": "777", "ts": t} for t in ("9", "8"))]
    lines.append({**LINES[0], "who": "single", "sku": "778"})
    target = tmp_path / "made"
    assert prepare(write(tmp_path / "log.csv", lines), target, *RETRIEVAL, "--part-rows", "40") == 0
    users = by_user(lines)
    long = {user: events for user, events in users.items() if len(events) >= 3}
    for split, last in (("validation", 2), ("test", 1)):
        actual = {row["user_id"]: row for row in rows(target, split)}
        assert set(actual) == set(long)
        for user, row in actual.items():
            assert row["uih_item_id"] == [int(line["sku"]) for line in long[user][:-last]]
            assert row["candidate_item_id"] == [int(long[user][-last]["sku"])]
            assert row["request_time"] == row["candidate_timestamps"][0] == long[user][-last]["ts"]
    train = {row["user_id"]: row["uih_item_id"] for row in rows(target, "train")}
    assert train.pop("short") == [777, 777]
    assert train == {
        user: [int(e["sku"]) for e in events[:-2]] for user, events in long.items() if len(events) > 3
    }
    latest = rows(target, "latest")
    assert {row["user_id"]: row["uih_item_id"] for row in latest} == {
        user: [int(e["sku"]) for e in events] for user, events in users.items()
    }
    assert {row["request_time"] for row in latest} == {max(int(line["ts"]) for line in lines)}
    assert not any(name.startswith("candidate_") for name in latest[0])
    ids = pq.read_table(target / "vocabulary" / "item_id.parquet")["id"].to_pylist()
    assert sorted(ids) == sorted({int(line["sku"]) for line in lines})


def as_parquet(path: Path, *, typed: bool) -> Path:
    columns = {name: [line[name] for line in LINES] for name in COLUMNS}
    table = pa.table(columns)
    if typed:
        moments = [datetime.fromtimestamp(int(ts), timezone.utc) for ts in columns["ts"]]
        table = table.set_column(2, "ts", pa.array(moments, pa.timestamp("ms", "UTC")))
        table = table.set_column(3, "clicked", pa.array([value == "1" for value in columns["clicked"]]))
        table = table.set_column(1, "sku", pa.array([int(value) for value in columns["sku"]]))
    pq.write_table(table, path, row_group_size=64)
    return path


@pytest.mark.parametrize(
    "form", ["tsv", "gz", "folder", "parquet text", "parquet", "ms", "us", "iso", "zone", "float"]
)
def test_every_form_of_input_gives_the_same_rows(tmp_path, form):
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "plain", *RANKING) == 0
    extra = []
    if form == "tsv":
        source = write(tmp_path / "log.tsv", delimiter="\t")
    elif form == "gz":
        source = write(tmp_path / "log.csv.gz")
    elif form == "folder":
        (tmp_path / "logs").mkdir()
        source = write(tmp_path / "logs" / "a.csv", LINES[:90]).parent
        write(source / "b.csv.gz", LINES[90:])
    elif form.startswith("parquet"):
        source = as_parquet(tmp_path / "log.parquet", typed=form == "parquet")
    else:
        written = {
            "ms": lambda ts: f"{ts}017",
            "us": lambda ts: f"{ts}000017",
            "float": lambda ts: f"{ts}.25",
            "iso": lambda ts: datetime.fromtimestamp(int(ts), timezone.utc).replace(tzinfo=None).isoformat(),
            "zone": lambda ts: datetime.fromtimestamp(int(ts), timezone.utc).isoformat(),
        }[form]
        source = write(tmp_path / "log2.csv", [{**line, "ts": written(line["ts"])} for line in LINES])
        extra = ["--time-unit", {"float": "s", "zone": "iso"}.get(form, form)]
    assert prepare(source, tmp_path / "made", *RANKING, *extra) == 0
    for split in ("train", "validation", "test"):
        assert rows(tmp_path / "made", split) == rows(tmp_path / "plain", split)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2024-02-29", 1_709_164_800_000_000),
        ("2024-02-29T12:00:00Z", 1_709_208_000_000_000),
        ("2024-02-29 12:00:00.5+02:00", 1_709_200_800_500_000),
    ],
)
def test_dates_of_several_forms_in_one_column(text, expected):
    piece = Piece(pl.DataFrame({"t": ["1970-01-01T00:00:01", text]}), "log", 2, "line", "iso")
    assert _microseconds(piece, "t").to_list() == [1_000_000, expected]


def test_ids_that_are_not_all_whole_numbers_stay_text(tmp_path):
    lines = [{**line, "sku": "007"} if number == 299 else line for number, line in enumerate(LINES)]
    assert prepare(write(tmp_path / "log.csv", lines), tmp_path / "made", *RETRIEVAL) == 0
    ids = pq.read_table(tmp_path / "made" / "vocabulary" / "item_id.parquet")["id"].to_pylist()
    assert "007" in ids and set(ids) == {line["sku"] for line in lines}


def test_the_same_input_gives_the_same_bytes(tmp_path):
    source = write(tmp_path / "log.csv")
    first, second = tmp_path / "a" / "made", tmp_path / "b" / "made"
    for target in (first, second):
        target.parent.mkdir()
        assert prepare(source, target, *RANKING, "--part-rows", "40") == 0
    files = [path for path in sorted(first.rglob("*")) if path.is_file()]
    assert len(files) > 10
    for path in files:
        copy = second / path.relative_to(first)
        assert path.read_bytes().replace(bytes(first), b"") == copy.read_bytes().replace(bytes(second), b"")


@pytest.mark.parametrize("arguments", [RANKING, RETRIEVAL])
def test_the_starter_config_has_no_findings(tmp_path, arguments):
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "made", *arguments) == 0
    resolved = config.resolve(config.load(tmp_path / "made" / "starter.config")).pipeline
    assert config.check(resolved) == []
    assert resolved.features[0].id.vocabulary.size == 40
    assert compare_with_files(resolved) == ([], [])
    shorter = config.prepare(tmp_path / "made" / "starter.config", ["train.num_steps=3000"])
    assert (shorter.pipeline.train.num_steps, shorter.warnings) == (3000, [])


@pytest.mark.parametrize(
    ("change", "arguments", "code", "message"),
    [
        ({"clicked": "yes"}, RANKING, 3, "log.csv, line 12: clicked is 'yes', expected a number"),
        ({"clicked": "2"}, RANKING, 3, "log.csv, line 12: clicked is '2', expected 0 or 1"),
        ({"price": "nan"}, RANKING, 3, "log.csv, line 12: price is 'nan', expected a number"),
        ({"dwell": "-1"}, RANKING, 3, "log.csv, line 12: dwell is '-1', expected a duration of at least 0"),
        ({"sku": ""}, RETRIEVAL, 3, "log.csv, line 12: sku is '', expected an id"),
        ({"ts": "-5"}, RETRIEVAL, 3, "log.csv, line 12: ts is '-5', expected a time in s since 1970"),
        ({"ts": "1700000000000"}, RETRIEVAL, 3, "expected a time in s since 1970; set --time-unit"),
        ({}, [*RETRIEVAL, "--item-feature", "brandt"], 3, "no column brandt (did you mean brand?)"),
        ({}, [*BASE, "--task", "ranking"], 2, "--task ranking needs at least one --label NAME=COLUMN"),
        ({}, [*RETRIEVAL, "--label", "click=clicked"], 2, "takes no --label"),
        ({}, [*RETRIEVAL, "--user-feature", "age"], 2, "does not use features of users (age)"),
        ({}, [*RANKING, "--item-feature", "brand"], 2, "'brand' would stand for two columns"),
        ({}, [*RANKING, "--label", "click=dwell"], 2, "--label click=...: given 2 times; names must differ"),
        ({}, [*RANKING, "--action", "click=dwell"], 2, "--action click=...: given 2 times"),
        ({}, [*RETRIEVAL, "--item-column", "who"], 2, "--item-column who: is the column of --user-column"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, change, arguments, code, message):
    lines = [{**line, **change} if number == 10 else line for number, line in enumerate(LINES)]
    assert prepare(write(tmp_path / "log.csv", lines), tmp_path / "made", *arguments) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_file_that_is_no_table_of_text_is_named(tmp_path, capsys):
    log, made = tmp_path / "log.csv", tmp_path / "made"
    for content, message in (
        (b"", "log.csv: the file is empty; its first line must name the columns"),
        (b"who,sku,ts\nu,a,1\nu,\xe4,2\n", "log.csv, line 3: byte 0xe4 is not UTF-8"),
        (b"who,sku,ts,sku\nu,a,1,b\n", "log.csv: 2 columns are called sku; rename all but one"),
        (b"who,sku,ts\n", "no events"),
    ):
        log.write_bytes(content)
        assert prepare(log, made, *BASE, "--task", "retrieval") == 3
        assert message in capsys.readouterr().err
    assert prepare(log, Path("/dev/null/made"), *BASE, "--task", "retrieval") == 2
    assert "--output /dev/null/made: cannot be written: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_blank_lines_behind_the_last_event_are_no_events(tmp_path, capsys):
    log = write(tmp_path / "log.csv")
    assert prepare(log, tmp_path / "a b", *RETRIEVAL) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"next: python -m recsys.train --config '{tmp_path}/a b/starter.config' --run-dir 'runs/a b'"
    )
    told = f"#   python -m recsys.train --config '{tmp_path}/a b/starter.config' --run-dir 'runs/a b'"
    assert told in (tmp_path / "a b" / "starter.config").read_text().splitlines()
    log.write_text(log.read_text() + "\n\n")
    assert prepare(log, tmp_path / "b", *RETRIEVAL) == 0
    assert rows(tmp_path / "b", "train") == rows(tmp_path / "a b", "train")
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:5], "", *lines[5:]]))
    assert prepare(log, tmp_path / "c", *RETRIEVAL) == 3
    assert "log.csv, line 6: who is '', expected an id" in capsys.readouterr().err


def test_numbers_below_0_to_predict_get_a_loss_that_takes_them(tmp_path):
    for name, change in (("plain", {}), ("signed", {"dwell": "-1"})):
        lines = [{**line, **change} if number == 10 else line for number, line in enumerate(LINES)]
        flags = [*BASE, "--task", "ranking", "--label", "score=dwell:regression"]
        assert prepare(write(tmp_path / f"{name}.csv", lines), tmp_path / name, *flags) == 0
        (task,) = config.load(tmp_path / name / "starter.config").model.ranker.tasks
        assert task.loss.mean_squared_error.log1p == (name == "plain")


def test_a_log_without_anything_to_hold_out_is_refused(tmp_path, capsys):
    same = [{**line, "ts": "5"} for line in LINES]
    assert prepare(write(tmp_path / "log.csv", same), tmp_path / "made", *RANKING) == 3
    assert "split; events must differ in time" in capsys.readouterr().err
    few = [{**line, "who": str(number // 2)} for number, line in enumerate(LINES)]
    assert prepare(write(tmp_path / "log.csv", few), tmp_path / "made", *RETRIEVAL) == 3
    assert "no rows for the validation split; some user needs at least 3 events" in capsys.readouterr().err
    # A user of three has one event before those held out, and nothing behind it to learn.
    three = [{**line, "who": str(number // 3)} for number, line in enumerate(LINES[: len(LINES) // 3 * 3])]
    assert prepare(write(tmp_path / "log.csv", three), tmp_path / "made", *RETRIEVAL) == 3
    assert "no rows for the train split; some user needs at least 4 events" in capsys.readouterr().err


def test_a_file_cut_short_is_named(tmp_path, capsys):
    whole = as_parquet(tmp_path / "log.parquet", typed=True).read_bytes()
    (tmp_path / "log.parquet").write_bytes(whole[: len(whole) // 2])
    assert prepare(tmp_path / "log.parquet", tmp_path / "made", *RETRIEVAL) == 3
    assert "log.parquet cannot be read as parquet" in capsys.readouterr().err
    packed = write(tmp_path / "log.csv.gz").read_bytes()
    (tmp_path / "log.csv.gz").write_bytes(packed[: len(packed) // 2])
    assert prepare(tmp_path / "log.csv.gz", tmp_path / "made", *RETRIEVAL) == 3
    assert "log.csv.gz cannot be read" in capsys.readouterr().err


def test_an_unknown_flag_or_a_malformed_one_is_a_usage_error(tmp_path, capsys):
    for arguments in (
        [*RETRIEVAL, "--itemfeature", "x"],
        [*RANKING, "--label", "a b=c"],
        [*RANKING, "--test-share", "2"],
        [*RETRIEVAL, "--delimiter", ";;"],
        [*RETRIEVAL, "--item-list", "brand", "--list-delimiter", ""],
    ):
        with pytest.raises(SystemExit) as stopped:
            prepare(write(tmp_path / "log.csv"), tmp_path / "made", *arguments)
        assert stopped.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("unit", "said"),
    [
        # 1,700,000,000 is 2023-11-14 22:13:20 UTC; a thousandth of it is 19 days, 16 hours and 13 minutes.
        ("s", "events from 2023-11-14 22:13:%s to 2023-11-14 23:%s UTC\n"),
        ("ms", "events from 1970-01-20 16:13:%s to 1970-01-20 16:13:%s UTC; is --time-unit ms right?\n"),
    ],
)
def test_the_time_of_the_events_is_shown(tmp_path, capsys, unit, said):
    assert prepare(write(tmp_path / "log.csv"), tmp_path / "out", *RETRIEVAL, "--time-unit", unit) == 0
    assert re.search(re.escape(said).replace("%s", "[0-9:]+"), capsys.readouterr().out)
