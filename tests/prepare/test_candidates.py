"""`--candidates` of `recsys.prepare csv`: rows against a loop over the log, and what it refuses."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys.prepare import __main__ as command
from tests.prepare.test_broken_inputs import run

UNKNOWN = 2**63 - 1
HISTORY = 6
BASE = [
    "--task", "ranking", "--user-column", "who", "--item-column", "sku", "--time-column", "ts",
    "--label", "hit=hit", "--action", "hit=hit", "--watch-time-column", "seen",
    "--item-feature", "brand", "--item-feature", "shop", "--item-list", "tags", "--item-number", "price",
    "--user-feature", "place", "--user-number", "age", "--max-history", str(HISTORY),
]  # fmt: skip


def made_up_log(*, whole_numbers: bool) -> list[dict[str, str]]:
    """Events in no order; an item's features change with time."""
    generator = random.Random(3)
    prefix = "" if whole_numbers else "i"
    return [
        {
            "who": ("" if whole_numbers else "u") + str(generator.randrange(1, 9)),
            "sku": prefix + str(generator.randrange(30)),
            "ts": str(1_700_000_000 + time),
            "hit": str(generator.randrange(2)),
            "seen": str(generator.randrange(90)),
            "brand": str(generator.randrange(4)),
            "shop": "s" + str(generator.randrange(4)),
            "tags": "|".join(str(tag) for tag in generator.sample(range(5), generator.randrange(3))),
            "price": str(generator.randrange(100)),
            "place": "p" + str(generator.randrange(3)),
            "age": str(generator.randrange(99)),
        }
        for time in generator.sample(range(0, 90_000, 97), 200)
    ]


def write(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(",".join(line) for line in [lines[0], *(line.values() for line in lines)]))
    return path


def prepared(capsys, folder: Path, lines: list, candidates: list, *flags: str) -> list[dict]:
    """The rows `latest`, by user and place, after a look at the output."""
    log = write(folder / "log.csv", lines)
    asked = write(folder / "asked.csv", candidates)
    assert run(capsys, folder, "csv", "--input", log, "--candidates", asked, *BASE, *flags) == (0, "")
    return pq.read_table(folder / "made" / "latest").to_pylist()


def id_of(text: str, whole_numbers: bool) -> int | str:
    return int(text) if whole_numbers else text


def row_by_hand(lines: list, user: str, place: str | None, skus: list[str], *, whole: bool) -> dict:
    """A row of `latest`, without request_id, of candidates without features of their own."""
    ordered = sorted(lines, key=lambda line: int(line["ts"]))
    last = {line["sku"]: line for line in ordered}
    mine = [line for line in ordered if line["who"] == user]
    now = int(ordered[-1]["ts"])
    unknown = {"brand": "", "shop": "", "tags": "", "price": "5"}

    def features(prefix: str, events: list[dict]) -> dict:
        return {
            f"{prefix}_brand": [int(line["brand"] or UNKNOWN) for line in events],
            f"{prefix}_shop": [line["shop"] for line in events],
            f"{prefix}_tags": [[int(tag) for tag in line["tags"].split("|") if tag] for line in events],
            f"{prefix}_price": [float(line["price"]) for line in events],
        }

    history = mine[-HISTORY:]
    return {
        "user_id": id_of(user, whole),
        "request_time": now,
        "place": place if place is not None else mine[-1]["place"] if mine else "",
        "age": float(mine[-1]["age"]) if mine else 33.0,
        "uih_item_id": [id_of(line["sku"], whole) for line in history],
        "uih_timestamps": [int(line["ts"]) for line in history],
        **features("uih", history),
        "uih_actions": [int(line["hit"]) for line in history],
        "uih_watch_time": [float(line["seen"]) for line in history],
        "candidate_item_id": [id_of(sku, whole) for sku in skus],
        "candidate_timestamps": [now] * len(skus),
        **features("candidate", [last.get(sku, unknown) for sku in skus]),
    }


@pytest.mark.parametrize("whole", [True, False], ids=["numbers", "texts"])
@pytest.mark.parametrize("part_rows", ["1000000", "40"])
def test_rows_are_those_of_a_loop_over_the_log(tmp_path, capsys, whole, part_rows):
    lines = made_up_log(whole_numbers=whole)
    user, item = ("", "") if whole else ("u", "i")
    asked = [(f"{user}{number % 11 + 1}", f"{item}{number * 7 % 33}") for number in range(33)]
    candidates = [{"sku": sku, "who": who, "other": "x"} for who, sku in [*asked, asked[0]]]
    log = write(tmp_path / "log.csv", lines)
    table = write(tmp_path / "asked.csv", candidates)
    flags = ["--fill", "price=5", "--fill", "age=33", "--part-rows", part_rows]
    code = run(capsys, tmp_path, "csv", "--input", log, "--candidates", table, *BASE, *flags)
    assert code == (0, "")
    rows = pq.read_table(tmp_path / "made" / "latest").to_pylist()
    skus: dict[str, list[str]] = {}
    for who, sku in asked:
        skus.setdefault(who, []).append(sku)
    expected = [row_by_hand(lines, who, None, skus[who], whole=whole) for who in skus]
    numbers = {row["user_id"]: row.pop("request_id") for row in rows}
    # One part keeps the order of the candidates; users without an event come last.
    order = {row["user_id"]: place for place, row in enumerate(rows)}
    if part_rows == "1000000":
        known = {line["who"] for line in lines}
        assert [row["user_id"] for row in rows] == [
            id_of(who, whole)
            for who in sorted(skus, key=lambda who: (who not in known, list(skus).index(who)))
        ]
    assert rows == sorted(expected, key=lambda row: order[row["user_id"]])
    assert numbers == {id_of(who, whole): 200 + place for place, who in enumerate(skus)}
    split = json.loads((tmp_path / "made" / "schema.json").read_text())["splits"]["latest"]
    assert (split["rows"], split["candidates"], split["empty_histories"]) == (11, 33, 3)


def test_what_is_unknown_or_repeated_is_counted(tmp_path, capsys):
    lines = made_up_log(whole_numbers=True)
    asked = [("1", "0"), ("77", "1"), ("1", "99"), ("1", "0"), ("78", "99"), ("1", "0")]
    log = write(tmp_path / "log.csv", lines)
    table = write(tmp_path / "asked.csv", [{"who": who, "sku": sku, "price": "1"} for who, sku in asked])
    flags = ["--input", str(log), "--candidates", str(table), "--output", str(tmp_path / "made")]
    assert command.main(["csv", *flags, *BASE, "--fill", "age=1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "latest: 3 rows, 4 candidates" in said
    assert (
        "candidates without an event in the log: 2 of 3 users (empty history), 1 of 3 items (unknown to a "
        "model)"
    ) in said
    assert "candidates left out because they repeat an earlier line: 2" in said


def test_features_of_the_file_come_before_those_of_the_log(tmp_path, capsys):
    """Two places of one user are two rows; an empty cell is unknown, as in the log."""
    lines = made_up_log(whole_numbers=True)
    candidates = [
        {"who": "2", "sku": "4", "price": "7.5", "place": "home", "tags": "3| 9", "brand": "77"},
        {"who": "2", "sku": "5", "price": "8", "place": "work", "tags": "", "brand": ""},
        {"who": "2", "sku": "4", "price": "9", "place": "home", "tags": "", "brand": "1"},
        {"who": "99", "sku": "5", "price": "8", "place": "", "tags": "", "brand": ""},
    ]
    rows = prepared(capsys, tmp_path, lines, candidates, "--fill", "age=33")
    for row in rows:
        del row["request_id"]
    expected = [
        row_by_hand(lines, "2", "home", ["4", "4"], whole=True)
        | {"candidate_price": [7.5, 9], "candidate_tags": [[3, 9], []], "candidate_brand": [77, 1]},
        row_by_hand(lines, "2", "work", ["5"], whole=True)
        | {"candidate_price": [8], "candidate_tags": [[]], "candidate_brand": [UNKNOWN]},
        row_by_hand(lines, "99", "", ["5"], whole=True)
        | {"candidate_price": [8], "candidate_tags": [[]], "candidate_brand": [UNKNOWN]},
    ]
    assert rows == expected


def test_the_rest_of_the_data_is_that_without_candidates(tmp_path, capsys):
    lines = made_up_log(whole_numbers=True)
    tables, schemas = [], []
    for name, flags in (("with", True), ("without", False)):
        folder = tmp_path / name
        folder.mkdir()
        log = write(folder / "log.csv", lines)
        table = ["--candidates", write(folder / "asked.csv", [{"who": "2", "sku": "4"}])] if flags else []
        assert run(capsys, folder, "csv", "--input", log, *table, *BASE) == (0, "")
        files = sorted((folder / "made").rglob("*.parquet"))
        tables.append({p.relative_to(folder): pq.read_table(p) for p in files if "latest" not in p.parts})
        schemas.append(json.loads((folder / "made" / "schema.json").read_text()))
    assert tables[0] == tables[1]
    del schemas[0]["splits"]["latest"]
    (asked,) = [entry for entry in schemas[0]["inputs"] if entry not in schemas[1]["inputs"]]
    assert asked["name"] == "asked.csv"
    schemas[0]["inputs"].remove(asked)
    assert schemas[0] == schemas[1]


@pytest.mark.parametrize(
    ("content", "flags", "code", "message"),
    [
        ("who,skuu\n1,2\n", [], 3, "asked.csv: no column sku (did you mean skuu?); it has who, skuu"),
        ("who;sku\n1;2\n", [], 3, "It has all of them with --delimiter ';'"),
        ("who,sku,sku\n1,2,3\n", [], 3, "2 columns are called sku; rename all but one"),
        ("who,sku,place,place\n1,2,3,4\n", [], 3, "2 columns are called place; rename all but one"),
        ("who,sku\n", [], 3, "asked.csv: no candidates after the header"),
        ("", [], 3, "asked.csv: the file is empty; its first line must name the columns"),
        ("who,sku\n1,2\n,3\n", [], 3, "asked.csv, line 3: who is '', expected an id"),
        ("who,sku\n1,2\n1,\n", [], 3, "asked.csv, line 3: sku is '', expected an id"),
        ("who,sku\n1,2\n1\n", [], 3, "asked.csv, line 3: 1 values, the header has 2"),
        ("who,sku\n1,2\n1,x7\n", [], 3, "asked.csv, line 3: sku is 'x7', but every such id in the log is a"),
        ("who,sku\n1,2\n007,3\n", [], 3, "asked.csv, line 3: who is '007', but every such id in the log is"),
        ("who,sku,tags\n1,2,\n1,3,4|b\n", [], 3, "asked.csv, line 3: tags is 'b', but every such id in"),
        ("who,sku,price\n1,2,cheap\n", [], 3, "asked.csv, line 2: price is 'cheap', expected a number"),
        ("who,sku\n1,2\n1,99\n", [], 3, "asked.csv, line 3: neither this file nor the log says what price"),
        ("who,sku\n1,2\n99,2\n", [], 3, "asked.csv, line 3: neither this file nor the log says what age is;"),
        ("who,sku\n1,99\n", ["--fill", "price=x"], 3, "--fill, value 1: price is 'x', expected a number"),
        (None, [], 3, "asked.csv: no such file"),
    ],
)  # fmt: skip
def test_candidates_that_cannot_be_used_are_named(tmp_path, capsys, content, flags, code, message):
    log = write(tmp_path / "log.csv", made_up_log(whole_numbers=True))
    if content is not None:
        (tmp_path / "asked.csv").write_text(content)
    given = ["--input", log, "--candidates", tmp_path / "asked.csv"]
    assert (said := run(capsys, tmp_path, "csv", *given, *BASE, *flags))[0] == code
    assert message in said[1]


def test_retrieval_takes_no_candidates(tmp_path, capsys):
    flags = [*BASE[2:8], "--task", "retrieval", "--candidates", "x.csv"]
    code, said = run(capsys, tmp_path, "csv", "--input", "log.csv", *flags)
    assert code == 2 and "--candidates is for --task ranking; with --task retrieval all items are" in said
