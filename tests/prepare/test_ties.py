"""Orders of events of one time: each tool against a sort by hand."""

import csv
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys.prepare import __main__ as command

FLAGS = ["--task", "retrieval", "--user-column", "who", "--item-column", "sku", "--time-column", "day"]


def made_up_log() -> list[dict[str, str]]:
    """Events of few days, so that most neighbors tie; items are unique, so that a history tells its order."""
    generator = random.Random(0)
    return [
        {
            "who": f"u{generator.randrange(8)}",
            "sku": str(number * 37 % 240),
            "day": str(1_700_000_000 + 86_400 * generator.randrange(6)),
            "place": str(generator.randrange(1, 30)),
            "shop": generator.choice("abc"),
        }
        for number in range(240)
    ]


LINES = made_up_log()


def prepare(folder: Path, name: str, *flags: str) -> dict[str, list[int]]:
    """Runs the tool csv and returns the whole history of each user."""
    source = folder / "log.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(LINES[0]))
        writer.writeheader()
        writer.writerows(LINES)
    target = folder / name
    assert command.main(["csv", "--input", str(source), "--output", str(target), *FLAGS, *flags]) == 0
    return {row["user_id"]: row["uih_item_id"] for row in pq.read_table(target / "latest").to_pylist()}


def sorted_by_hand(*keys) -> dict[str, list[int]]:
    users = {}
    for line in sorted(LINES, key=lambda line: (int(line["day"]), *(key(line) for key in keys))):
        users.setdefault(line["who"], []).append(int(line["sku"]))
    return users


def share_by_hand() -> float:
    pairs = tied = 0
    for user in {line["who"] for line in LINES}:
        days = sorted(line["day"] for line in LINES if line["who"] == user)
        pairs += len(days) - 1
        tied += sum(first == second for first, second in zip(days, days[1:], strict=False))
    return tied / pairs


@pytest.mark.parametrize("part_rows", ["1000000", "60"])
@pytest.mark.parametrize(
    ("ties", "keys"),
    [
        ("file", []),
        ("place", [lambda line: int(line["place"])]),
        ("shop", [lambda line: line["shop"]]),
        ("sku", [lambda line: int(line["sku"])]),
    ],
)
def test_ties_stand_in_the_order_of_the_file_or_of_a_column(tmp_path, capsys, ties, keys, part_rows):
    histories = prepare(tmp_path, "made", "--ties", ties, "--part-rows", part_rows)
    assert histories == sorted_by_hand(*keys)
    schema = json.loads((tmp_path / "made" / "schema.json").read_text())
    assert schema["ties"] == {"order": ties, "share": round(share_by_hand(), 4)}
    order = "in the order of the input" if ties == "file" else f"by {ties}"
    share = f"{100 * share_by_hand():.1f} %"
    said = f"{share} of neighboring events of a user have the same time; these are {order}"
    assert said in capsys.readouterr().out.splitlines()


def test_a_shuffle_keeps_days_and_depends_on_the_seed_alone(tmp_path):
    day = {int(line["sku"]): line["day"] for line in LINES}
    first = prepare(tmp_path, "a", "--ties", "shuffle")
    assert first == prepare(tmp_path, "b", "--ties", "shuffle", "--seed", "0", "--part-rows", "60")
    second = prepare(tmp_path, "c", "--ties", "shuffle", "--seed", "1")
    plain = sorted_by_hand()
    for histories in (first, second):
        assert {user: sorted(items) for user, items in histories.items()} == {
            user: sorted(items) for user, items in plain.items()
        }
        for items in histories.values():
            assert [day[item] for item in items] == sorted(day[item] for item in items)
    assert first != plain and second != plain and first != second
    assert json.loads((tmp_path / "c" / "schema.json").read_text())["ties"]["seed"] == 1


def test_a_shuffle_favors_no_place(tmp_path):
    """Each of two events that tie comes first about as often as the other."""
    row = {int(line["sku"]): number for number, line in enumerate(LINES)}
    day = {int(line["sku"]): line["day"] for line in LINES}
    kept = pairs = 0
    for seed in range(6):
        for items in prepare(tmp_path, f"s{seed}", "--ties", "shuffle", "--seed", str(seed)).values():
            for first, second in zip(items, items[1:], strict=False):
                if day[first] == day[second]:
                    pairs += 1
                    kept += row[first] < row[second]
    # About 1,100 pairs of a fair coin: a standard deviation is 1.5 %.
    assert pairs > 900 and abs(kept / pairs - 0.5) < 0.06


def test_ties_of_sequences(tmp_path, capsys):
    items, times = tmp_path / "items.txt", tmp_path / "times.txt"
    items.write_text(
        "".join(f"u{user} " + " ".join(str(user * 40 + n) for n in range(40)) + "\n" for user in range(4))
    )
    times.write_text(
        "".join(f"u{user} " + " ".join(str(1000 + n // 20) for n in range(40)) + "\n" for user in range(4))
    )
    base = ["sequences", "--input", str(items), "--output"]
    assert command.main([*base, str(tmp_path / "made"), "--times", str(times), "--ties", "shuffle"]) == 0
    for row in pq.read_table(tmp_path / "made" / "latest").to_pylist():
        place = [item % 40 for item in row["uih_item_id"]]
        assert sorted(place[:20]) == list(range(20)) and place[:20] != list(range(20))
    assert command.main([*base, str(tmp_path / "none"), "--ties", "shuffle"]) == 2
    assert "without --times there are none" in capsys.readouterr().err


def test_ties_of_movielens(tmp_path):
    generator = random.Random(1)
    ratings = [
        (user, movie, generator.randrange(1, 6), 1000 + generator.randrange(3))
        for user in range(1, 5)
        for movie in generator.sample(range(1, 31), 30)
    ]
    head = "userId,movieId,rating,timestamp"
    (tmp_path / "ratings.csv").write_text("\n".join([head, *(",".join(map(str, line)) for line in ratings)]))
    movies = [f"{movie},Movie (1995),Drama" for movie in range(1, 31)]
    (tmp_path / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]))
    for ties, key in (("file", None), ("movieId", 1), ("rating", 2)):
        target = tmp_path / ties
        flags = ["--input", str(tmp_path), "--output", str(target), "--ties", ties]
        assert command.main(["movielens", *flags]) == 0
        for row in pq.read_table(target / "test.parquet").to_pylist():
            lines = [line for line in ratings if line[0] == row["user_id"]]
            lines.sort(key=lambda line: (line[3], line[key] if key else 0))
            assert row["uih_item_id"] + row["candidate_item_id"] == [line[1] for line in lines]
