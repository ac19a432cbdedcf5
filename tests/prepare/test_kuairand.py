"""`recsys.prepare kuairand` on lines of the original files: each row against a loop over the CSV; what it
refuses."""

import csv
import gzip
import json
import math
import shutil
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys.prepare import __main__ as command
from recsys.prepare import kuairand

ORIGINAL = Path(__file__).resolve().parents[1] / "data" / "kuairand" / "original"
LOG = "log_standard_4_25_to_5_08_pure.csv"
BITS = {
    "is_click": 1,
    "is_like": 2,
    "is_follow": 4,
    "is_comment": 8,
    "is_forward": 16,
    "is_hate": 32,
    "long_view": 64,
    "is_profile_enter": 128,
}


def prepare(source: Path, target: Path, *arguments: str) -> int:
    return command.main(["kuairand", "--input", str(source), "--output", str(target), *arguments])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    target = tmp_path_factory.mktemp("kuairand") / "made"
    assert prepare(ORIGINAL, target, "--rows-per-group", "16", "--max-history", "5", "--min-count", "1") == 0
    return target


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(ORIGINAL, tmp_path / "original"))


def read(name):
    with open(ORIGINAL / name, newline="") as file:
        return list(csv.DictReader(file))


def beijing_day(line):
    moment = datetime.fromtimestamp(int(line["time_ms"]) / 1000, timezone(timedelta(hours=8)))
    return moment.date().isoformat()


def split_of(line):
    day = beijing_day(line)
    return "test" if day >= "2022-05-07" else "validation" if day >= "2022-05-05" else "train"


def distinct_lines():
    """Lines of the log without copies, the first of each, with their number as `number`."""
    results = {}
    for number, line in enumerate(read(LOG)):
        results.setdefault(tuple(line[name] for name in kuairand.LOG), line | {"number": number})
    return list(results.values())


def brute_force_requests(*, gap_ms=60_000, max_candidates=10, max_history=5, live=False):
    """Request id -> (split, history, candidates), lines of the log, by the rules at the head of the tool."""
    users = {}
    for line in distinct_lines():
        users.setdefault(int(line["user_id"]), []).append(line)
    requests = {}
    for lines in users.values():
        lines.sort(key=lambda line: int(line["time_ms"]))
        request = []
        for line in lines:
            same = request and all(
                (
                    line["tab"] == request[-1]["tab"],
                    beijing_day(line) == beijing_day(request[-1]),
                    int(line["time_ms"]) - int(request[-1]["time_ms"]) <= gap_ms,
                    len(request) < max_candidates,
                )
            )
            if not same:
                request = []
                requests[line["number"]] = request
            request.append(line)
    made = {}
    for number, request in requests.items():
        start = int(request[0]["time_ms"])
        history = [line for line in users[int(request[0]["user_id"])] if int(line["time_ms"]) < start]
        split = split_of(request[0])
        if split != "train" and not live:
            history = [line for line in history if split_of(line) != split]
        made[number] = (split, history[-max_history:], request)
    return made


def logit(share):
    return math.log(share / (1 - share))


def expected_counters(candidates, *, live=False):
    """Column -> values, by a loop over the log for each candidate: what was known before its day or split."""
    videos = {line["video_id"]: line for line in read("video_features_basic_pure.csv")}
    begin = {"validation": "2022-05-05", "test": "2022-05-07"}
    columns = {}
    for candidate in candidates:
        until = beijing_day(candidate) if live else begin.get(split_of(candidate), beijing_day(candidate))
        earlier = [line for line in distinct_lines() if beijing_day(line) < until]
        for key, what in (("item", "video_id"), ("author", "author_id")):
            wanted = videos[candidate["video_id"]][what]
            same = [line for line in earlier if videos[line["video_id"]][what] == wanted]
            columns.setdefault(f"candidate_{key}_impressions", []).append(len(same))
            for label in ("is_click", "long_view", "is_like"):
                positives = sum(line[label] == "1" for line in earlier)
                lift = 0.0
                if 0 < positives < len(earlier):
                    share = positives / len(earlier)
                    rate = (sum(line[label] == "1" for line in same) + 5) / (len(same) + 5 / share)
                    lift = logit(rate) - logit(share)
                columns.setdefault(f"candidate_{key}_{label}_lift", []).append(lift)
    return {name: pytest.approx(values, rel=1e-5, abs=1e-6) for name, values in columns.items()}


def expected_row(history, candidates):
    """The columns of a row, from lines of the original files."""
    videos = {line["video_id"]: line for line in read("video_features_basic_pure.csv")}
    users = {line["user_id"]: line for line in read("user_features_pure.csv")}
    row = {name: users[candidates[0]["user_id"]][name] for name in kuairand.USER}
    hour = datetime.fromtimestamp(int(candidates[0]["time_ms"]) / 1000, timezone(timedelta(hours=8))).hour
    row |= {
        "user_id": candidates[0]["user_id"],
        "request_id": candidates[0]["number"],
        "request_time": int(candidates[0]["time_ms"]) // 1000,
        "tab": candidates[0]["tab"],
        "hour": hour,
    }
    for prefix, lines in (("uih_", history), ("candidate_", candidates)):
        row |= {
            prefix + "item_id": [int(line["video_id"]) for line in lines],
            prefix + "timestamps": [int(line["time_ms"]) // 1000 for line in lines],
            prefix + "author_id": [int(videos[line["video_id"]]["author_id"]) for line in lines],
            prefix + "upload_type": [videos[line["video_id"]]["upload_type"] for line in lines],
            prefix + "tag": [
                [int(t) for t in videos[line["video_id"]]["tag"].split(",") if t] for line in lines
            ],
            prefix + "tab": [int(line["tab"]) for line in lines],
            prefix + "duration": pytest.approx([int(line["duration_ms"]) / 1000 for line in lines]),
        }
    row["uih_watch_time"] = pytest.approx([int(line["play_time_ms"]) / 1000 for line in history])
    row["uih_actions"] = [sum(bit for name, bit in BITS.items() if line[name] == "1") for line in history]
    for name in ("is_click", "long_view", "is_like"):
        row[f"candidate_{name}"] = [float(line[name]) for line in candidates]
    row["candidate_watch_time"] = pytest.approx([int(line["play_time_ms"]) / 1000 for line in candidates])
    return row


def test_every_row_is_what_a_loop_over_the_log_says(prepared):
    expected = brute_force_requests()
    actual = 0
    for split in ("train", "validation", "test"):
        table = pq.read_table(prepared / f"{split}.parquet", page_checksum_verification=True)
        for row in table.to_pylist():
            actual += 1
            wanted_split, history, candidates = expected[row["request_id"]]
            assert wanted_split == split
            wanted = expected_row(history, candidates) | expected_counters(candidates)
            assert set(row) == set(wanted)
            for name, value in wanted.items():
                got = str(row[name]) if isinstance(value, str) else row[name]
                assert got == value, (row["request_id"], name)
    assert actual == len(expected) > 200


def test_live_histories_reach_up_to_each_request(tmp_path):
    arguments = ("--max-history", "5", "--min-count", "1", "--evaluation-history", "live")
    assert prepare(ORIGINAL, tmp_path / "made", *arguments) == 0
    expected, frozen = brute_force_requests(live=True), brute_force_requests()
    differ = 0
    for split in ("train", "validation", "test"):
        for row in pq.read_table(tmp_path / "made" / f"{split}.parquet").to_pylist():
            items = [int(line["video_id"]) for line in expected[row["request_id"]][1]]
            assert row["uih_item_id"] == items
            differ += items != [int(line["video_id"]) for line in frozen[row["request_id"]][1]]
    assert differ > 10


def counters(row):
    return {name: row[name] for name in row if name.endswith(("_impressions", "_lift"))}


def test_live_counters_reach_up_to_each_day(tmp_path):
    # On the second day of the split they know its first day.
    arguments = ("--min-count", "1", "--evaluation-history", "live")
    assert prepare(ORIGINAL, tmp_path / "made", *arguments) == 0
    requests = brute_force_requests(live=True)
    differ = 0
    for row in pq.read_table(tmp_path / "made" / "test.parquet").to_pylist():
        candidates = requests[row["request_id"]][2]
        assert counters(row) == expected_counters(candidates, live=True)
        differ += counters(row) != expected_counters(candidates)
    assert differ > 5


def test_no_counter_knows_a_label_of_its_own_day_or_of_a_later_one(copy, prepared, tmp_path):
    days = sorted({beijing_day(line) for line in read(LOG)})
    middle = days[4]
    lines = read(LOG)
    for line in lines:
        if beijing_day(line) >= middle:
            line |= {name: str(1 - int(line[name])) for name in ("is_click", "long_view", "is_like")}
    with open(copy / LOG, "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    arguments = ("--max-history", "5", "--min-count", "1")
    assert prepare(copy, tmp_path / "made", *arguments) == 0
    before, after = (
        {row["request_id"]: row for row in pq.read_table(folder / "train.parquet").to_pylist()}
        for folder in (prepared, tmp_path / "made")
    )
    day = {number: beijing_day(request[0]) for number, (_, _, request) in brute_force_requests().items()}
    compared = changed = 0
    for number, row in before.items():
        same = counters(row) == counters(after[number])
        if day[number] <= middle:
            assert same
            compared += 1
        else:
            changed += not same
    assert compared > 20 and changed > 20


def test_counters_are_numbers_of_the_schema_and_can_be_left_out(prepared, tmp_path):
    names = {
        f"{key}_{rest}"
        for key in ("item", "author")
        for rest in ("impressions", "is_click_lift", "long_view_lift", "is_like_lift")
    }
    schema = json.loads((prepared / "schema.json").read_text())
    actual = {entry["name"]: entry for entry in schema["features"]}
    assert names <= set(actual) and set(schema["counters"]["columns"]) == names
    assert all(actual[name]["sides"] == ["CANDIDATE"] and actual[name]["kind"] == "number" for name in names)
    arguments = ("--max-history", "5", "--min-count", "1", "--no-counters")
    assert prepare(ORIGINAL, tmp_path / "made", *arguments) == 0
    assert "counters" not in json.loads((tmp_path / "made" / "schema.json").read_text())
    for split in ("train", "validation", "test"):
        table = pq.read_table(tmp_path / "made" / f"{split}.parquet")
        full = pq.read_table(prepared / f"{split}.parquet")
        assert set(full.column_names) - set(table.column_names) == {f"candidate_{name}" for name in names}
        assert table.equals(full.select(table.column_names))


def test_rows_stand_in_the_order_of_time_and_histories_end_before_the_request(prepared):
    for split in ("train", "validation", "test"):
        rows = pq.read_table(prepared / f"{split}.parquet").to_pylist()
        assert [r["request_time"] for r in rows] == sorted(r["request_time"] for r in rows)
        for row in rows:
            assert row["uih_timestamps"] == sorted(row["uih_timestamps"])
            assert not row["uih_timestamps"] or row["uih_timestamps"][-1] <= row["request_time"]


def test_impressions_logged_twice_count_once(prepared):
    lines = read(LOG)
    distinct = {tuple(line[name] for name in kuairand.LOG) for line in lines}
    assert len(distinct) < len(lines)
    schema = json.loads((prepared / "schema.json").read_text())
    assert schema["dropped"] == {"impressions_logged_twice": len(lines) - len(distinct)}
    assert sum(split["candidates"] for split in schema["splits"].values()) == len(distinct)


def test_vocabularies_count_training_impressions_only(prepared):
    videos = {line["video_id"]: line for line in read("video_features_basic_pure.csv")}
    train = sorted(
        (
            line
            for split, _, request in brute_force_requests().values()
            if split == "train"
            for line in request
        ),
        key=lambda line: line["number"],
    )
    expected = {
        "item_id": Counter(int(line["video_id"]) for line in train),
        "tag": Counter(int(t) for line in train for t in videos[line["video_id"]]["tag"].split(",") if t),
    }
    for name, counts in expected.items():
        table = pq.read_table(prepared / "vocabulary" / f"{name}.parquet").to_pydict()
        assert dict(zip(table["id"], table["count"], strict=True)) == counts
        assert table["count"] == sorted(table["count"], reverse=True)
    # Ties keep the order of first occurrence, as Counter does.
    table = pq.read_table(prepared / "vocabulary" / "item_id.parquet")
    assert table["id"].to_pylist() == [item for item, _ in expected["item_id"].most_common()]


def test_an_empty_value_is_no_id(prepared):
    users = {line["user_id"]: line["onehot_feat4"] for line in read("user_features_pure.csv")}
    ids = pq.read_table(prepared / "vocabulary" / "onehot_feat4.parquet")["id"].to_pylist()
    assert "" in users.values() and "" not in ids and set(ids) <= set(users.values())


def test_the_same_input_gives_the_same_bytes(prepared, tmp_path):
    again = tmp_path / "made"
    assert prepare(ORIGINAL, again, "--rows-per-group", "16", "--max-history", "5", "--min-count", "1") == 0
    files = sorted(p.relative_to(prepared) for p in prepared.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    for name in files:
        ours, theirs = (prepared / name).read_bytes(), (again / name).read_bytes()
        # The starter config names the folder it was written for.
        assert ours.replace(str(prepared).encode(), b"") == theirs.replace(str(again).encode(), b""), name


def test_the_log_may_come_in_several_files_and_compressed(copy, prepared, tmp_path):
    lines = (copy / LOG).read_text().splitlines(keepends=True)
    (copy / LOG).unlink()
    for name, part in (("4_25", lines[:100]), ("5_01", [lines[0], *lines[100:]])):
        with gzip.open(copy / f"log_standard_{name}.csv.gz", "wt") as file:
            file.writelines(part)
    assert prepare(copy, tmp_path / "made", "--max-history", "5", "--min-count", "1") == 0
    for split in ("train", "validation", "test"):
        ours = pq.read_table(tmp_path / "made" / f"{split}.parquet")
        assert ours.equals(pq.read_table(prepared / f"{split}.parquet"))


def edit(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("".join(lines))


def refuse(capsys, source, target, *arguments):
    """Exit code and message of a run that must leave nothing behind."""
    code = prepare(source, target, *arguments)
    assert not target.exists() and not list(target.parent.glob(f".{target.name}*"))
    return code, capsys.readouterr().err


def test_a_misspelt_column_is_named_with_the_nearest(copy, tmp_path, capsys):
    edit(copy / LOG, 1, "is_click", "is_clicked")
    code, message = refuse(capsys, copy, tmp_path / "made")
    assert code == 3 and f"{LOG}: no column is_click (did you mean is_clicked?)" in message


def test_a_value_that_is_no_number_is_named_with_its_line(copy, tmp_path, capsys):
    edit(copy / LOG, 7, ",2022", ",x2022")
    edit(copy / LOG, 8, read(LOG)[6]["time_ms"], "soon")
    code, message = refuse(capsys, copy, tmp_path / "made")
    assert code == 3 and f"{LOG}, line 8: time_ms is 'soon', expected an integer" in message


def test_a_line_with_a_value_too_many_is_named(copy, tmp_path, capsys):
    edit(copy / LOG, 9, ",", ",0,")
    code, message = refuse(capsys, copy, tmp_path / "made")
    assert code == 3 and f"{LOG}, line 9: 20 values, the header has 19" in message


def test_missing_files_and_strangers_are_named(copy, tmp_path, capsys):
    code, message = refuse(capsys, tmp_path / "nowhere", tmp_path / "made")
    assert code == 3 and "nowhere: no such folder" in message
    videos = copy / "video_features_basic_pure.csv"
    first = read(videos.name)[0]["video_id"]
    edit(videos, 2, first, "999999")
    code, message = refuse(capsys, copy, tmp_path / "made")
    assert code == 3 and f"video {first} of the log is not in video_features_basic_pure.csv" in message
    videos.unlink()
    code, message = refuse(capsys, copy, tmp_path / "made")
    assert code == 3 and "no file video_features_basic*.csv* (video features)" in message


def test_days_must_leave_something_to_train_on(tmp_path, capsys):
    code, message = refuse(capsys, ORIGINAL, tmp_path / "made", "--test-days", "12")
    assert code == 2 and "the log spans 14 days" in message


def test_an_output_with_something_in_it_is_only_replaced_on_request(tmp_path, capsys):
    target = tmp_path / "made"
    target.mkdir()
    (target / "mine.txt").write_text("keep")
    assert prepare(ORIGINAL, target) == 2
    assert "--overwrite" in capsys.readouterr().err and (target / "mine.txt").read_text() == "keep"
    assert prepare(ORIGINAL, target, "--overwrite", "--min-count", "1") == 0
    assert not (target / "mine.txt").exists() and (target / "train.parquet").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_min_count_that_no_id_reaches_is_refused(tmp_path, capsys):
    code, message = refuse(capsys, ORIGINAL, tmp_path / "made", "--min-count", "100")
    assert code == 3 and "no item_id occurs 100 times in the training rows; lower --min-count" in message
