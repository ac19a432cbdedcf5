"""`recsys.prepare movielens` on lines of the original files and on made-up files in ml-1m's format."""

import csv
import json
import shutil
import zipfile
from collections import Counter
from math import ceil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys.prepare import __main__ as command

DATA = Path(__file__).resolve().parents[1] / "data" / "movielens"
ORIGINAL = DATA / "original"
MOVIES = [
    "1::Amélie (2001)::Comedy|Romance",
    "2::A Film: Again (1999)::Drama",
    "3::Never Rated (1950)::Drama",
]
MOVIES += ["4::Plain (1960)::Western", "5::Other (1970)::Comedy"]
# User 7: equal times stand in the order of the file, not of movie ids; user 8 has two ratings, user 9 one.
RATINGS = [
    "7::4::5::100",
    "7::5::3::90",
    "7::2::4::100",
    "7::1::1::100",
    "8::1::2::7",
    "8::2::2::6",
    "9::5::5::1",
]


def prepare(source: Path, target: Path, *arguments: str) -> int:
    return command.main(["movielens", "--input", str(source), "--output", str(target), *arguments])


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_dat(folder: Path, ratings=RATINGS, movies=MOVIES) -> Path:
    folder.mkdir()
    (folder / "ratings.dat").write_text("\n".join(ratings) + "\n")
    (folder / "movies.dat").write_text("\n".join(movies) + "\n", encoding="latin-1")
    return folder


def rows(folder, split):
    return pq.read_table(folder / f"{split}.parquet", page_checksum_verification=True).to_pylist()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    target = tmp_path_factory.mktemp("movielens") / "made"
    assert prepare(ORIGINAL, target, "--rows-per-group", "4") == 0
    return target


def test_leave_one_out_on_original_lines(prepared):
    genres = {line["movieId"]: line["genres"].split("|") for line in read(ORIGINAL / "movies.csv")}
    users = {}
    for line in read(ORIGINAL / "ratings.csv"):
        users.setdefault(int(line["userId"]), []).append(line)
    made = {split: rows(prepared, split) for split in ("train", "train_validation", "validation", "test")}
    for number, (user, lines) in enumerate(sorted(users.items())):
        lines.sort(key=lambda line: int(line["timestamp"]))
        for split, kept, target in (
            ("train", lines[:-2], None),
            ("train_validation", lines[:-1], None),
            ("validation", lines[:-2], lines[-2]),
            ("test", lines[:-1], lines[-1]),
        ):
            expected = {
                "user_id": user,
                "request_time": int((target or kept[-1])["timestamp"]),
                "uih_item_id": [int(line["movieId"]) for line in kept],
                "uih_timestamps": [int(line["timestamp"]) for line in kept],
                "uih_genres": [genres[line["movieId"]] for line in kept],
                "uih_actions": [2 ** ceil(float(line["rating"])) for line in kept],
            }
            if target:
                expected |= {
                    "candidate_item_id": [int(target["movieId"])],
                    "candidate_timestamps": [int(target["timestamp"])],
                    "candidate_genres": [genres[target["movieId"]]],
                }
            assert made[split][number] == expected
    assert all(len(actual) == len(users) for actual in made.values())


def test_the_catalogue_is_every_movie_and_counts_training_only(prepared):
    counts = Counter(item for row in rows(prepared, "train") for item in row["uih_item_id"])
    movies = [int(line["movieId"]) for line in read(ORIGINAL / "movies.csv")]
    table = pq.read_table(prepared / "vocabulary" / "item_id.parquet").to_pydict()
    assert sorted(table["id"]) == sorted(movies)
    assert table["count"] == [counts[item] for item in table["id"]]
    assert table["count"] == sorted(table["count"], reverse=True)
    # Movies without a training event stand in the order of the list of movies.
    assert [i for i, n in zip(table["id"], table["count"], strict=True) if n == 0] == [
        movie for movie in movies if movie not in counts
    ]


def test_ml_1m_format_ties_in_file_order_and_short_users(tmp_path):
    target = tmp_path / "made"
    assert prepare(write_dat(tmp_path / "in"), target) == 0
    train, test = rows(target, "train"), rows(target, "test")
    assert [(r["user_id"], r["uih_item_id"]) for r in train] == [(7, [5, 4]), (8, [2, 1]), (9, [5])]
    assert [(r["user_id"], r["uih_item_id"], r["candidate_item_id"]) for r in test] == [(7, [5, 4, 2], [1])]
    assert rows(target, "validation")[0]["candidate_item_id"] == [2]
    assert test[0]["uih_actions"] == [1 << 3, 1 << 5, 1 << 4]
    names = pq.read_table(target / "names.parquet").to_pydict()
    assert names == {"id": [1, 2, 3, 4, 5], "name": [line.split("::")[1] for line in MOVIES]}


def test_the_bytes_of_every_file_are_checked_by_its_reader(tmp_path):
    target = tmp_path / "made"
    assert prepare(write_dat(tmp_path / "in"), target) == 0
    for path in target.rglob("*.parquet"):
        column = pq.ParquetFile(path).metadata.row_group(0).column(0)
        begin = column.dictionary_page_offset or column.data_page_offset
        damaged = bytearray(path.read_bytes())
        damaged[begin + column.total_compressed_size - 1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(OSError, match="checksum|CRC"):
            pq.read_table(path, page_checksum_verification=True)


def test_a_zip_file_gives_what_its_folder_gives(tmp_path):
    folder = write_dat(tmp_path / "ml-1m")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"ml-1m/{path.name}")
    assert prepare(folder, tmp_path / "a") == prepare(tmp_path / "ml-1m.zip", tmp_path / "b") == 0
    for split in ("train", "train_validation", "validation", "test"):
        assert (tmp_path / "a" / f"{split}.parquet").read_bytes() == (
            tmp_path / "b" / f"{split}.parquet"
        ).read_bytes()


def test_max_history_keeps_the_newest(tmp_path):
    assert prepare(write_dat(tmp_path / "in"), tmp_path / "made", "--max-history", "2") == 0
    assert rows(tmp_path / "made", "test")[0]["uih_item_id"] == [4, 2]


def test_the_same_input_gives_the_same_bytes(prepared, tmp_path):
    assert prepare(ORIGINAL, tmp_path / "made", "--rows-per-group", "4") == 0
    for path in prepared.rglob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "made" / path.relative_to(prepared)).read_bytes(), path.name


@pytest.mark.parametrize(
    ("ratings", "movies", "message"),
    [
        (["7::4::5", *RATINGS], MOVIES, r"ratings.dat, line 1: 3 values, expected 4"),
        ([*RATINGS, "7::four::5::1"], MOVIES, r"ratings.dat, line 8: movieId is 'four', expected an integer"),
        ([*RATINGS, "7::6::5::1"], MOVIES, r"movie 6 is rated but not in the list of movies"),
        ([*RATINGS, "7::1::6::1"], MOVIES, r"rating 8 is 6.0, stars are 0.5 to 5"),
        (RATINGS, [*MOVIES, MOVIES[0]], r"movie 1 occurs twice"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, capsys, ratings, movies, message):
    assert prepare(write_dat(tmp_path / "in", ratings, movies), tmp_path / "made") == 3
    assert message in capsys.readouterr().err and not (tmp_path / "made").exists()


def test_missing_files_are_named(tmp_path, capsys):
    assert prepare(tmp_path / "nowhere", tmp_path / "made") == 3
    assert "nowhere: no such file or folder" in capsys.readouterr().err
    (tmp_path / "not.zip").write_text("text")
    assert prepare(tmp_path / "not.zip", tmp_path / "made") == 3
    assert "is not a zip file" in capsys.readouterr().err
    shutil.copytree(ORIGINAL, tmp_path / "in")
    (tmp_path / "in" / "movies.csv").unlink()
    assert prepare(tmp_path / "in", tmp_path / "made") == 3
    assert "neither movies.dat nor movies.csv" in capsys.readouterr().err


def test_the_bundled_sample_is_latest_small_and_nothing_that_may_not_be_passed_on():
    schema = json.loads((DATA / "schema.json").read_text())
    assert [entry["name"] for entry in schema["inputs"]] == ["ratings.csv", "movies.csv"]
    train, test = rows(DATA, "train"), rows(DATA, "test")
    assert len(train) == len(test) == 671
    assert sum(len(row["uih_item_id"]) for row in test) + len(test) == 100_004
    assert pq.read_metadata(DATA / "vocabulary" / "item_id.parquet").num_rows == 9125
    assert "redistribute the data set" in (DATA / "README.txt").read_text()
