"""Makes next-item data from a MovieLens release: leave-one-out splits, one row per user.

    python scripts/prepare_movielens.py --input ml-1m.zip --output data/ml-1m
    python scripts/prepare_movielens.py --input ml-latest-small --output data/ml-latest-small

Takes the zip file or folder of a release with ratings.dat (`::`, ml-1m and ml-10m) or ratings.csv (later).

- All ratings count, whatever their stars; no user or movie is left out.
- Order: by user and time, equal times in the order of the file (a stable sort; another order moves up to a
  quarter of the targets, so it belongs to the protocol).
- The last movie of a user is the test target, the one before it the validation target, the rest is training
  history. `train_validation.parquet` is all but the test target, for a final run with settings chosen before.
- The catalogue is every movie of movies.dat / movies.csv, rated or not, the most frequent in training first.
- `uih_actions` holds the stars: bit ceil(stars), so 3.5 and 4 stars are bit 4.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recsys.errors import DataError
from scripts import prepare_common as common
from scripts.prepare_config import write_config
from scripts.prepare_rows import (
    TEST,
    TRAIN,
    VALIDATION,
    Contents,
    DatasetWriter,
    Feature,
    holdout_slices,
    plain_table,
)

RATINGS = {
    "userId": common.INTEGER,
    "movieId": common.INTEGER,
    "rating": common.NUMBER,
    "timestamp": common.INTEGER,
}
MOVIES = {"movieId": common.INTEGER, "title": common.TEXT, "genres": common.TEXT}
NO_GENRES = "(no genres listed)"
SIDES = ("HISTORY", "CANDIDATE")
CONTENTS = Contents(
    task="retrieval",
    features=(Feature("item_id", SIDES), Feature("genres", SIDES, multi_valued=True)),
    actions=(None, *(f"stars_{stars}" for stars in range(1, 6))),
)
ABOUT = {
    "source": "MovieLens (F. M. Harper, J. A. Konstan, ACM TiiS 5(4), 2015), https://grouplens.org/datasets/movielens",
    "licence": "GroupLens terms in the README of the release; only some releases may be redistributed",
    "made_by": "scripts/prepare_movielens.py",
}


def main(arguments: list[str] | None = None) -> None:
    """Reads, splits, writes; see the head of this file."""
    options = _options(arguments)
    ratings, movies = read_release(options.input)
    events = join_movies(ratings, movies)
    table = plain_table(events)
    user = events["user_id"].to_numpy()
    with common.output_folder(options.output, overwrite=options.overwrite) as folder:
        writer = DatasetWriter(folder, CONTENTS, rows_per_group=options.rows_per_group)
        for split, held_out in ((TRAIN, 2), ("train_validation", 1), (VALIDATION, 2), (TEST, 1)):
            with_candidate = split in (VALIDATION, TEST)
            slices = holdout_slices(
                user, held_out=held_out, with_candidate=with_candidate, max_history=options.max_history
            )
            # A training row has no request: its time is that of its last event.
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
        movies.select(id="movieId", name="title").write_parquet(folder / "names.parquet")
        about = ABOUT | {
            "inputs": common.fingerprints(
                [options.input] if options.input.is_file() else _files(options.input)
            ),
            "settings": {"max_history": options.max_history},
            "dropped": {"users_with_one_rating": _count_short(user)},
        }
        schema = writer.write_schema(about, sizes)
        write_config(schema, folder, options.output)
    print(f"{schema['splits'][TRAIN]['rows']} users, {events.height} ratings, {sizes['item_id']} movies")
    common.print_next(options.output)


def read_release(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ratings (userId, movieId, rating, timestamp) and movies (movieId, title, genres) in file order.

    Raises:
        DataError: no such release, a line that does not parse, a movie twice.
    """
    if path.is_file() and not zipfile.is_zipfile(path):
        raise DataError(f"{path} is no zip file; --input takes a MovieLens zip file or its folder")
    if path.is_file():
        frames = [_read_zipped(path, "ratings", RATINGS), _read_zipped(path, "movies", MOVIES)]
    else:
        ratings, movies = _files(path)
        frames = [
            _read_table(ratings.read_bytes(), str(ratings), RATINGS),
            _read_table(movies.read_bytes(), str(movies), MOVIES),
        ]
    ratings, movies = frames
    twice = movies.filter(pl.col("movieId").is_duplicated())
    if twice.height:
        raise DataError(f"{path}: movie {twice[0, 'movieId']} stands twice in the list of movies")
    return ratings, movies


def join_movies(ratings: pl.DataFrame, movies: pl.DataFrame) -> pl.DataFrame:
    """Events by user and time, ties in the order of the file."""
    genres = movies.select("movieId", genres=_genres(movies))
    events = ratings.with_row_index("order").join(genres, on="movieId", how="left", maintain_order="left")
    unknown = events.filter(pl.col("genres").is_null())
    if unknown.height:
        raise DataError(f"movie {unknown[0, 'movieId']} is rated but not in the list of movies")
    wrong = events.filter(~pl.col("rating").is_between(0.5, 5))
    if wrong.height:
        raise DataError(f"rating {wrong[0, 'order'] + 1} is {wrong[0, 'rating']}, stars are 0.5 to 5")
    stars = pl.col("rating").ceil().cast(pl.Int64)
    return events.sort("userId", "timestamp", "order").select(
        user_id="userId",
        order=pl.col("order").cast(pl.Int64),
        timestamps="timestamp",
        item_id="movieId",
        genres="genres",
        actions=pl.lit(2, pl.Int64).pow(stars).cast(pl.Int64),
    )


def _genres(movies: pl.DataFrame) -> pl.Series:
    """Lists of genres; a movie without any has an empty list."""
    text = pl.col("genres")
    none = (text == NO_GENRES) | (text == "")
    empty = pl.lit([], pl.List(pl.String))
    return movies.select(pl.when(none).then(empty).otherwise(text.str.split("|")).alias("genres"))["genres"]


def _files(folder: Path) -> list[Path]:
    """The files of ratings and of movies in a folder."""
    if not folder.exists():
        raise DataError(f"{folder}: no such file or folder")
    chosen = []
    for stem in ("ratings", "movies"):
        there = [
            folder / f"{stem}{suffix}"
            for suffix in (".dat", ".csv")
            if (folder / f"{stem}{suffix}").is_file()
        ]
        if not there:
            raise DataError(f"{folder}: neither {stem}.dat nor {stem}.csv in it")
        chosen.append(there[0])
    return chosen


def _read_zipped(path: Path, stem: str, kinds: dict[str, str]) -> pl.DataFrame:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if Path(name).name in (f"{stem}.dat", f"{stem}.csv")]
        if len(names) != 1:
            raise DataError(f"{path}: holds {len(names)} files {stem}.dat or {stem}.csv, expected one")
        return _read_table(archive.read(names[0]), f"{path}/{names[0]}", kinds)


def _read_table(content: bytes, where: str, kinds: dict[str, str]) -> pl.DataFrame:
    """Typed columns of a .csv file with a header, or of a .dat file, which has `::` and none."""
    if where.endswith(".csv"):
        return common.read_csv_stream(io.BytesIO(content), where, kinds)
    # ml-1m's titles are latin-1; its other files are ASCII.
    lines = pl.Series("line", content.decode("latin-1").splitlines(), dtype=pl.String)
    fields = lines.str.split("::")
    wrong = (fields.list.len() != len(kinds)).arg_true()
    if len(wrong):
        raise DataError(
            f"{where}, line {wrong[0] + 1}: {fields[wrong[0]].len()} values, expected {len(kinds)}"
        )
    texts = pl.DataFrame({name: fields.list.get(place) for place, name in enumerate(kinds)})
    return common.typed(texts, kinds, where, 1)


def _count_short(user: np.ndarray) -> int:
    return int((np.unique(user, return_counts=True)[1] < 2).sum())


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--max-history", type=common.positive, help="newest movies of a history; default: all"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(common.run(main))
