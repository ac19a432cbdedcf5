"""Makes next-item data or ranking data from a MovieLens release.

    python -m recsys.prepare movielens --input ml-1m.zip --output data/ml-1m
    python -m recsys.prepare movielens --input ml-1m.zip --output data/ml-1m-ranking --task ranking
    python -m recsys.prepare movielens --input ml-latest-small --output data/ml-latest-small

Reads the zip file or folder of a release with ratings.dat (`::`; ml-1m and ml-10m) or ratings.csv (later).
--input may be an address: https://files.grouplens.org/datasets/movielens/ml-1m.zip

- All ratings count, whatever their stars; no user or movie is left out.
- Ratings are sorted by user and time, equal times in the order of the file (a stable sort; another order
  changes up to a quarter of the targets, so the order is part of the protocol). --ties shuffles equal times
  or sorts them by a column.
- `uih_actions` holds the stars: bit ceil(stars), so 3.5 and 4 stars are bit 4.

--task retrieval (default) predicts which movie is rated next: leave-one-out splits, one row per user.

- The last movie of a user is the test target, the one before it the validation target, the rest is training
  history. `train_validation.parquet` has all but the test target, for a final run with settings chosen
  before.
- The catalogue is every movie of movies.dat / movies.csv, rated or not, the most frequent in training first.
  `items.parquet` has genres and year of each, for the item encoder of a two-tower model.

--task ranking predicts whether a movie is liked (4 stars or more), and how many stars it gets:

- A row is a block of a user's consecutive ratings: at most --max-candidates of them, with pauses of at most
  --request-gap seconds. Its history is all that the user rated before it. ML-1M's users.dat adds gender, age
  and occupation.
- The last --test-percent of each user's ratings are the test split, the --validation-percent before them
  validation; equal times stay together. Most users rate in one sitting, so a cut at one moment for all
  would test on a fifth of them. Histories of validation and test end where the split begins for the user;
  with --evaluation-history live they reach up to each block. recsys/prepare/ratings.py says more.
- Vocabularies hold the ids of at least --min-count training ratings; others share the row of unknown ids.
"""

from __future__ import annotations

import argparse
import io
import lzma
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import ConfigError, DataError
from recsys.flags import positive
from recsys.prepare import command, ties
from recsys.prepare.dataset_writer import (
    SEQUENCE_SIDES,
    TEST,
    TRAIN,
    VALIDATION,
    Contents,
    DatasetWriter,
    Feature,
    plain_table,
)
from recsys.prepare.items import write_items
from recsys.prepare.ratings import RatingSettings, write_ranking
from recsys.prepare.rows import holdout_slices
from recsys.prepare.starter_config import write_config
from recsys.prepare.text_tables import (
    INTEGER,
    NUMBER,
    TEXT,
    UNREADABLE,
    fingerprints,
    read_csv_stream,
    typed,
)
from recsys.prepare.ties import sort_events

RATINGS = {
    "userId": INTEGER,
    "movieId": INTEGER,
    "rating": NUMBER,
    "timestamp": INTEGER,
}
MOVIES = {"movieId": INTEGER, "title": TEXT, "genres": TEXT}
USERS = {
    "userId": INTEGER,
    "gender": TEXT,
    "age": INTEGER,
    "occupation": INTEGER,
    "zip": TEXT,
}
KINDS = {"ratings": RATINGS, "movies": MOVIES, "users": USERS}
# The .csv releases describe no users.
NAMES = {
    "ratings": ("ratings.dat", "ratings.csv"),
    "movies": ("movies.dat", "movies.csv"),
    "users": ("users.dat",),
}
BROKEN_ZIP = (*UNREADABLE, zipfile.BadZipFile, lzma.LZMAError, NotImplementedError, RuntimeError, ValueError)
"""Errors that reading a zip file raises if it is damaged, encrypted or packed by an unknown method."""

NO_GENRES = "(no genres listed)"
CONTENTS = Contents(
    task="retrieval",
    features=(Feature("item_id", SEQUENCE_SIDES), Feature("genres", SEQUENCE_SIDES, multi_valued=True)),
    actions=(None, *(f"stars_{stars}" for stars in range(1, 6))),
)
ABOUT = {
    "source": "MovieLens (F. M. Harper, J. A. Konstan, ACM TiiS 5(4), 2015), https://grouplens.org/datasets/movielens",
    "licence": "GroupLens terms in the README of the release; only some releases may be redistributed",
    "made_by": f"{command.PROGRAM} movielens",
}
RANKING_SETTINGS = [field.name for field in fields(RatingSettings) if field.name != "max_history"]


class Release(NamedTuple):
    """The tables of a release, in file order.

    Attributes:
        ratings: columns userId, movieId, rating, timestamp.
        movies: columns movieId, title, genres.
        users: columns userId, gender, age, occupation, zip; None if the release has no users.dat.
    """

    ratings: pl.DataFrame
    movies: pl.DataFrame
    users: pl.DataFrame | None


def main(arguments: list[str] | None = None) -> None:
    """Reads a release, splits it and writes the data set."""
    options = _options(arguments)
    with command.local_inputs(
        options, "input", patterns=[name for names in NAMES.values() for name in names]
    ):
        _prepare(options)


def _prepare(options: argparse.Namespace) -> None:
    release = read_release(options.input)
    events = join_movies(release.ratings, release.movies, options.input, options.ties, options.seed)
    tied = ties.TieCounter()
    tied.add(events["user_id"].to_numpy(), events["timestamps"].to_numpy())
    inputs = [options.input] if options.input.is_file() else list(_files(options.input).values())
    about = ABOUT | {"inputs": fingerprints(inputs), "ties": tied.describe(options.ties, options.seed)}
    with command.output_folder(options.output, source=options.input, overwrite=options.overwrite) as folder:
        if options.task == "ranking":
            schema = write_ranking(
                folder,
                events,
                release.users,
                _rating_settings(options),
                actions=CONTENTS.actions,
                rows_per_group=options.rows_per_group,
                about=about,
            )
        else:
            schema = _write_retrieval(folder, events, release.movies, options, about)
        names = release.movies.select(id="movieId", name="title").to_arrow()
        pq.write_table(names, folder / "names.parquet", compression="zstd", write_page_checksum=True)
        write_config(schema, folder, options.output)
    users, movies = events["user_id"].n_unique(), release.movies.height
    print(f"{users} users, {events.height} ratings, {movies} movies in the release")
    print(ties.report(schema["ties"]))
    if options.task == "ranking":
        for name, split in schema["splits"].items():
            print(f"{name}: {split['rows']} rows, {split['candidates']} candidates")
    command.print_next(options.output)


def _write_retrieval(
    folder: Path, events: pl.DataFrame, movies: pl.DataFrame, options: argparse.Namespace, about: dict
) -> dict:
    """Writes leave-one-out rows, vocabularies and schema.json; returns the schema."""
    table, user = plain_table(events), events["user_id"].to_numpy()
    writer = DatasetWriter(folder, CONTENTS, rows_per_group=options.rows_per_group)
    for split, held_out in ((TRAIN, 2), ("train_validation", 1), (VALIDATION, 2), (TEST, 1)):
        with_candidate = split in (VALIDATION, TEST)
        slices = holdout_slices(
            user, held_out=held_out, with_candidate=with_candidate, max_history=options.max_history
        )
        # A training row has no request, so its time is the time of its last event.
        moment = slices.candidate_start if with_candidate else slices.history_end - 1
        rows = pa.table(
            {
                "user_id": pa.array(user[slices.history_end - 1]),
                "request_time": pa.array(events["timestamps"].to_numpy()[moment]),
            }
        )
        writer.write(split, f"{split}.parquet", table, slices, rows)
    sizes = writer.write_vocabularies(
        min_count=1, catalogue={"item_id": movies["movieId"], "genres": _genres(movies).explode()}
    )
    years = _years(movies).cast(pl.Int64, strict=False)
    write_items(folder, movies.select(item_id="movieId", genres=_genres(movies), year=years))
    more = {
        "settings": {"max_history": options.max_history},
        "dropped": {"users_with_one_rating": _count_short(user)},
    }
    return writer.write_schema(about | more, sizes)


def read_release(path: Path) -> Release:
    """Reads the tables of a zip file or folder.

    Raises:
        DataError: the release does not exist, a line cannot be parsed, or a movie occurs twice.
    """
    if path.is_file():
        contents = _zipped(path)
    else:
        contents = {stem: (str(file), file.read_bytes()) for stem, file in _files(path).items()}
    tables = {stem: _read_table(content, where, KINDS[stem]) for stem, (where, content) in contents.items()}
    movies = tables["movies"]
    twice = movies.filter(pl.col("movieId").is_duplicated())
    if twice.height:
        raise DataError(f"{path}: movie {twice[0, 'movieId']} occurs twice in the list of movies")
    return Release(tables["ratings"], movies, tables.get("users"))


def join_movies(
    ratings: pl.DataFrame, movies: pl.DataFrame, source: Path, ties: str, seed: int
) -> pl.DataFrame:
    """Joins ratings with their movies; sorts events by user and time, ties by `ties.sort_events`."""
    movie_columns = movies.select("movieId", genres=_genres(movies), year=_years(movies))
    events = ratings.with_row_index("order").join(
        movie_columns, on="movieId", how="left", maintain_order="left"
    )
    unknown = events.filter(pl.col("genres").is_null())
    if unknown.height:
        raise DataError(f"{source}: movie {unknown[0, 'movieId']} is rated but not in the list of movies")
    wrong = events.filter(~pl.col("rating").is_between(0.5, 5))
    if wrong.height:
        raise DataError(
            f"{source}: rating {wrong[0, 'order'] + 1} is {wrong[0, 'rating']}, stars are 0.5 to 5"
        )
    stars = pl.col("rating").ceil().cast(pl.Int64)
    return sort_events(events, "userId", "timestamp", ties, seed).select(
        user_id="userId",
        order=pl.col("order").cast(pl.Int64),
        timestamps="timestamp",
        item_id="movieId",
        genres="genres",
        year="year",
        rating="rating",
        actions=pl.lit(2, pl.Int64).pow(stars).cast(pl.Int64),
    )


def _genres(movies: pl.DataFrame) -> pl.Series:
    """Splits genres into lists; a movie without any has an empty list."""
    text = pl.col("genres")
    none = (text == NO_GENRES) | (text == "")
    empty = pl.lit([], pl.List(pl.String))
    return movies.select(pl.when(none).then(empty).otherwise(text.str.split("|")).alias("genres"))["genres"]


def _years(movies: pl.DataFrame) -> pl.Series:
    """Returns the year in brackets at the end of each title, as text; empty if there is none."""
    return movies["title"].str.strip_chars().str.extract(r"\((\d{4})\)$").fill_null("")


def _files(folder: Path) -> dict[str, Path]:
    """Finds the files of ratings, of movies and, if it exists, of users in a folder."""
    if not folder.exists():
        raise DataError(f"{folder}: no such file or folder")
    chosen = {}
    for stem, names in NAMES.items():
        present = [folder / name for name in names if (folder / name).is_file()]
        if present:
            chosen[stem] = present[0]
        elif stem != "users":
            raise DataError(f"{folder}: neither {' nor '.join(names)} in it")
    return chosen


def _zipped(path: Path) -> dict[str, tuple[str, bytes]]:
    """Reads the files of ratings, movies and users from a zip file; returns address and bytes of each."""
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a zip file; --input takes a MovieLens zip file or its folder")
    chosen = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for stem, names in NAMES.items():
                present = [name for name in archive.namelist() if Path(name).name in names]
                if len(present) == 1:
                    chosen[stem] = (f"{path}/{present[0]}", archive.read(present[0]))
                elif present or stem != "users":
                    raise DataError(f"{path}: holds {len(present)} files {' or '.join(names)}, expected one")
    except BROKEN_ZIP as error:
        raise DataError(f"{path} cannot be read: {str(error)[:200]}; download it again") from error
    return chosen


def _read_table(content: bytes, where: str, kinds: dict[str, str]) -> pl.DataFrame:
    """Parses a .csv file with a header, or a .dat file, which has `::` between values and no header."""
    if where.endswith(".csv"):
        return read_csv_stream(lambda: io.BytesIO(content), where, kinds)
    # ml-1m's titles are latin-1; its other files are ASCII.
    lines = pl.Series("line", content.decode("latin-1").splitlines(), dtype=pl.String)
    fields = lines.str.split("::")
    wrong = (fields.list.len() != len(kinds)).arg_true()
    if len(wrong):
        raise DataError(
            f"{where}, line {wrong[0] + 1}: {fields[wrong[0]].len()} values, expected {len(kinds)}"
        )
    texts = pl.DataFrame({name: fields.list.get(place) for place, name in enumerate(kinds)})
    return typed(texts, kinds, where, 1)


def _count_short(user: np.ndarray) -> int:
    return int((np.unique(user, return_counts=True)[1] < 2).sum())


def _rating_settings(options: argparse.Namespace) -> RatingSettings:
    settings = {name: getattr(options, name) for name in [*RANKING_SETTINGS, "max_history"]}
    return RatingSettings(**{name: value for name, value in settings.items() if value is not None})


def _options(arguments: list[str] | None) -> argparse.Namespace:
    defaults = RatingSettings()
    parser = command.parser("movielens", __doc__)
    parser.add_argument("--task", choices=("retrieval", "ranking"), default="retrieval")
    parser.add_argument(
        "--max-history", type=positive, help="most movies per history, the newest; default: all"
    )
    for name, meaning in (
        ("request-gap", "longest pause within a row, in seconds"),
        ("max-candidates", "most candidates per row"),
        ("validation-percent", "percent of each user's ratings for validation, before those for test"),
        ("test-percent", "percent of each user's ratings for test, the latest"),
        ("min-count", "number of training ratings that make an id known"),
        ("user-modulus", "keep only users whose id is divisible by this"),
    ):
        value = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=positive, help=f"ranking: {meaning}; default: {value}")
    command.add_evaluation_history(parser)
    parser.set_defaults(evaluation_history=None)
    ties.add_flags(parser, ["movieId", "rating"])
    options = parser.parse_args(arguments)
    ranking_flags = [name for name in RANKING_SETTINGS if getattr(options, name) is not None]
    if options.task != "ranking" and ranking_flags:
        raise ConfigError(f"--{ranking_flags[0].replace('_', '-')} is for --task ranking")
    return options
