"""`recsys.prepare movielens --task ranking`: each row against a loop over the original lines; splits;
refusals."""

import csv
import json
import random
import re
from collections import Counter
from math import ceil, inf
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from recsys import config
from recsys.data.loader import Loader
from recsys.models import layout_rule
from recsys.prepare import __main__ as command
from recsys.prepare.ratings import split_by_user

ORIGINAL = Path(__file__).resolve().parents[1] / "data" / "movielens" / "original"
SPLITS = ("train", "validation", "test")
GENRES = ("Drama", "Comedy", "Film-Noir")
USERS = [f"{user}::{'FM'[user % 2]}::{18 + user}::{user * 3}::00000" for user in (1, 2, 3, 4)]


def prepare(source: Path, target: Path, *arguments: str) -> int:
    given = ["--input", str(source), "--output", str(target), "--task", "ranking", *arguments]
    return command.main(["movielens", *given])


def rows(folder, split):
    return pq.read_table(folder / f"{split}.parquet", page_checksum_verification=True).to_pylist()


def dat_ratings():
    """(user, movie, stars, time) in the order of the file: many ratings a second, pauses of all lengths."""
    draw = random.Random(3)
    made = []
    for user, count in ((2, 41), (1, 1), (4, 23), (3, 2)):
        time = 1_000_000 * user
        for _ in range(count):
            time += draw.choice((0, 0, 1, 30, 3600, 3601, 10**6))
            made.append((user, draw.randrange(1, 9), draw.randrange(1, 6), time))
    draw.shuffle(made)
    return made


def write_dat(folder: Path, ratings, users=USERS) -> Path:
    folder.mkdir()
    movies = [f"{n}::Movie {n}{f' ({1990 + n})' if n != 5 else ''}::{GENRES[n % 3]}|War" for n in range(1, 9)]
    lines = ["::".join(map(str, rating)) for rating in ratings]
    for name, content in (("ratings", lines), ("movies", movies), ("users", users)):
        (folder / f"{name}.dat").write_text("\n".join(content) + "\n", encoding="latin-1")
    return folder


def brute_force(ratings, *, gap=3600, size=16, validation=10, test=10, longest=inf, live=False, modulus=1):
    """Number of a block's first rating -> (split, history, candidates), by the rules at the head of the tool.

    Ratings are (user, movie, stars, time, number).
    """
    made = {}
    for user in {rating[0] for rating in ratings if rating[0] % modulus == 0}:
        rated = sorted((r for r in ratings if r[0] == user), key=lambda rating: (rating[3], rating[4]))
        split = {}
        for place, rating in enumerate(rated):
            if place and rating[3] == rated[place - 1][3]:
                split[rating[4]] = split[rated[place - 1][4]]
            elif place >= len(rated) * (100 - test) / 100:
                split[rating[4]] = "test"
            else:
                begin = len(rated) * (100 - test - validation) / 100
                split[rating[4]] = "validation" if place >= begin else "train"
        blocks = []
        for rating in rated:
            last = blocks[-1] if blocks else None
            if (
                last is None
                or split[last[-1][4]] != split[rating[4]]
                or rating[3] - last[-1][3] > gap
                or len(last) == size
            ):
                blocks.append(last := [])
            last.append(rating)
        for block in blocks:
            name = split[block[0][4]]
            history = [rating for rating in rated if rating[3] < block[0][3]]
            if name != "train" and not live:
                history = [rating for rating in history if split[rating[4]] != name]
            if longest != inf:
                history = history[max(0, len(history) - longest) :]
            made[block[0][4]] = (name, history, block)
    return made


def check(folder, expected, about_movie, about_user):
    """Each row of the files is one of `expected`, and in the order of time."""
    actual = 0
    for split in SPLITS:
        table = rows(folder, split)
        assert [row["request_time"] for row in table] == sorted(row["request_time"] for row in table)
        for row in table:
            name, history, candidates = expected[row["request_id"]]
            wanted = {
                "user_id": candidates[0][0],
                "request_id": candidates[0][4],
                "request_time": candidates[0][3],
                "uih_actions": [2 ** ceil(rating[2]) for rating in history],
                "candidate_is_liked": [float(rating[2] >= 4) for rating in candidates],
                "candidate_rating": [float(rating[2]) for rating in candidates],
                **about_user(candidates[0][0]),
            }
            for prefix, ratings in (("uih", history), ("candidate", candidates)):
                wanted |= {
                    f"{prefix}_item_id": [rating[1] for rating in ratings],
                    f"{prefix}_timestamps": [rating[3] for rating in ratings],
                    f"{prefix}_genres": [about_movie(rating[1])[0] for rating in ratings],
                    f"{prefix}_year": [about_movie(rating[1])[1] for rating in ratings],
                }
            assert name == split and row == wanted
            actual += 1
    assert actual == len(expected)


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ([], {}),
        (["--evaluation-history", "live"], {"live": True}),
        (["--request-gap", "30", "--max-candidates", "3"], {"gap": 30, "size": 3}),
        (["--max-history", "4"], {"longest": 4}),
        (["--user-modulus", "2"], {"modulus": 2}),
        (["--validation-percent", "25", "--test-percent", "40"], {"validation": 25, "test": 40}),
    ],
)
def test_every_row_is_what_a_loop_over_ml_1m_lines_says(tmp_path, flags, rules):
    ratings = dat_ratings()
    folder = tmp_path / "made"
    assert prepare(write_dat(tmp_path / "in", ratings), folder, "--rows-per-group", "4", *flags) == 0
    numbered = [(*rating, number) for number, rating in enumerate(ratings)]
    check(
        folder,
        brute_force(numbered, **rules),
        lambda movie: ([GENRES[movie % 3], "War"], "" if movie == 5 else str(1990 + movie)),
        lambda user: {"gender": "FM"[user % 2], "age": 18 + user, "occupation": user * 3},
    )


def test_every_row_is_what_a_loop_over_latest_small_says(tmp_path):
    with open(ORIGINAL / "ratings.csv", newline="", encoding="utf-8") as file:
        ratings = [
            (int(line["userId"]), int(line["movieId"]), float(line["rating"]), int(line["timestamp"]), number)
            for number, line in enumerate(csv.DictReader(file))
        ]
    with open(ORIGINAL / "movies.csv", newline="", encoding="utf-8") as file:
        movies = {int(line["movieId"]): line for line in csv.DictReader(file)}

    def about(movie):
        year = re.search(r"\((\d{4})\)\s*$", movies[movie]["title"])
        return [g for g in movies[movie]["genres"].split("|") if g[0] != "("], year[1] if year else ""

    assert prepare(ORIGINAL, tmp_path / "made") == 0
    check(tmp_path / "made", brute_force(ratings), about, lambda user: {})


def test_the_splits_of_a_user():
    def split(times, *percents):
        return split_by_user(np.zeros(len(times), int), np.array(times), *percents).tolist()

    assert split(range(10), 10, 10) == ["train"] * 8 + ["validation", "test"]
    assert split(range(9), 10, 10) == ["train"] * 8 + ["validation"]
    assert split([5] * 10, 10, 10) == ["train"] * 10
    # The page that begins with the last training rating stays in training.
    assert split([0, 1, 2, 3, 4, 5, 6, 7, 7, 9], 10, 10) == ["train"] * 9 + ["test"]
    assert split(range(4), 50, 25) == ["train", "validation", "validation", "test"]
    assert split([], 10, 10) == []
    users = np.array([3] * 4 + [1] * 2)
    assert split_by_user(users, np.arange(6), 25, 25).tolist() == [
        *("train", "train", "validation", "test"),
        *("train", "validation"),
    ]


def test_no_label_and_no_later_rating_stands_in_a_history(tmp_path):
    assert prepare(write_dat(tmp_path / "in", dat_ratings()), tmp_path / "made") == 0
    for split in SPLITS:
        for row in rows(tmp_path / "made", split):
            assert all(time < row["request_time"] for time in row["uih_timestamps"])
            assert row["uih_timestamps"] == sorted(row["uih_timestamps"])


def test_vocabularies_count_training_candidates_and_schema_says_what_was_done(tmp_path):
    folder = tmp_path / "made"
    assert prepare(write_dat(tmp_path / "in", dat_ratings()), folder, "--min-count", "6") == 0
    train = rows(folder, "train")
    counts = Counter(item for row in train for item in row["candidate_item_id"])
    table = pq.read_table(folder / "vocabulary" / "item_id.parquet").to_pydict()
    assert dict(zip(table["id"], table["count"], strict=True)) == {i: n for i, n in counts.items() if n >= 6}
    assert 0 < len(table["id"]) < len(counts)
    years = Counter(year for row in train for year in row["candidate_year"] if year)
    table = pq.read_table(folder / "vocabulary" / "year.parquet").to_pydict()
    assert dict(zip(table["id"], table["count"], strict=True)) == {y: n for y, n in years.items() if n >= 6}
    schema = json.loads((folder / "schema.json").read_text())
    assert schema["settings"] == {
        "request_gap": 3600,
        "max_candidates": 16,
        "max_history": None,
        "validation_percent": 10,
        "test_percent": 10,
        "evaluation_history": "frozen",
        "min_count": 6,
        "user_modulus": 1,
    }
    assert [entry["name"] for entry in schema["inputs"]] == ["ratings.dat", "movies.dat", "users.dat"]
    assert schema["task"] == "ranking" and schema["labels"] == {"is_liked": "binary", "rating": "regression"}


@pytest.mark.parametrize("source", ["ml-1m", "latest-small"])
def test_the_starter_config_reads_what_was_made(tmp_path, source):
    original = ORIGINAL if source == "latest-small" else write_dat(tmp_path / "in", dat_ratings())
    assert prepare(original, tmp_path / "made", "--min-count", "1") == 0
    pipeline = config.prepare(tmp_path / "made" / "starter.config", ["data.num_workers=0"]).pipeline
    for split in SPLITS:
        batches = list(Loader.open(pipeline, split, layout_rule(pipeline)).epoch(0))
        wanted = rows(tmp_path / "made", split)
        assert sum(len(batch.request_time) for batch in batches) == len(wanted)
        liked = sum(float(batch.labels["is_liked"].sum()) for batch in batches)
        assert liked == sum(sum(row["candidate_is_liked"]) for row in wanted)


@pytest.mark.parametrize(
    ("change", "flags", "code", "message"),
    [
        (USERS[1:], [], 3, "user 1 has ratings but is not in the list of users"),
        ([*USERS, USERS[0]], [], 3, "user 1 occurs twice in the list of users"),
        (["1::F::18"], [], 3, "users.dat, line 1: 3 values, expected 5"),
        (USERS, ["--test-percent", "90"], 2, "leave none to train on"),
        (USERS, ["--task", "retrieval", "--min-count", "5"], 2, "--min-count is for --task ranking"),
        (USERS, ["--min-count", "99"], 3, "lower --min-count"),
        (USERS, ["--user-modulus", "99"], 3, "no rating is left with --user-modulus 99"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, change, flags, code, message):
    assert prepare(write_dat(tmp_path / "in", dat_ratings(), change), tmp_path / "made", *flags) == code
    assert message in capsys.readouterr().err and not (tmp_path / "made").exists()
