"""Cuts star ratings into ranking rows, for `python -m recsys.prepare movielens --task ranking`.

- A row is a block of one user's ratings: neighboring ones, each at most `request_gap` seconds after the one
  before it, cut after `max_candidates`. All of its movies are candidates and see the same history: what the
  user had rated strictly before the block. A row for each rating would repeat the longest user's history of
  2,313 events as often; with blocks of 16 the training rows of ML-1M hold 9 million events of history.
- The last ratings of each user are the test split, those before them validation. Ratings of one user with
  the same second (2.1 on average in ML-1M, where a page of ratings is sent at once) are never divided: all
  of them go where the first belongs.
- Why not one moment for everybody: 57 % of ML-1M's users rated in one sitting and never came back. A cut
  after 80 % of the ratings leaves 1,783 of 6,040 users to test on, 640 of whom sign up after it and have
  no history; after 90 % it leaves 1,209, nearly all of whom came back. The price of a cut by user is that
  training sees what *other* users say about a movie later on, the same for all models that are compared.
- Histories of validation and test end where the split begins for their user ("frozen"), as for scores
  computed before a visit, or reach up to each block ("live"). Training histories are live: a model learns
  from short and long ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from recsys.errors import ConfigError, DataError
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
from recsys.prepare.rows import Slices, freeze_histories, request_slices, run_starts

LIKED = 4
"""A movie with at least this many stars is liked."""

USER = ("gender", "age", "occupation")


@dataclass(frozen=True)
class RatingSettings:
    """Settings that decide how rows are cut; the fields have the names of the flags.

    Attributes:
        request_gap: longest pause within a block, in seconds.
        max_candidates: most ratings in a block.
        max_history: number of newest events that a history keeps; None: all.
        validation_percent, test_percent: shares of each user's ratings, in percent.
        evaluation_history: "frozen" or "live".
        min_count: number of training ratings that make an id known.
        user_modulus: only users whose id is divisible by this number are kept.
    """

    request_gap: int = 3600
    max_candidates: int = 16
    max_history: int | None = None
    validation_percent: int = 10
    test_percent: int = 10
    evaluation_history: str = "frozen"
    min_count: int = 5
    user_modulus: int = 1


def write_ranking(
    folder: Path,
    events: pl.DataFrame,
    users: pl.DataFrame | None,
    settings: RatingSettings,
    *,
    actions: tuple[str | None, ...],
    rows_per_group: int,
    about: Mapping[str, object],
) -> dict:
    """Writes rows, vocabularies and schema.json; returns the schema.

    Args:
        folder: folder to write to.
        events: events sorted by user and time: user_id, order, timestamps, item_id, genres, year, actions,
            rating.
        users: columns userId and `USER`; None if the release does not describe its users.
        settings: how rows are cut.
        actions: names of the bits of `actions`.
        rows_per_group: rows of a parquet row group.
        about: further entries of schema.json.

    Raises:
        ConfigError: nothing is left to train on.
        DataError: there is no rating, or a user is described twice or not at all.
    """
    events = events.filter(pl.col("user_id") % settings.user_modulus == 0)
    if not events.height:
        raise DataError(f"no rating is left with --user-modulus {settings.user_modulus}")
    user, time = events["user_id"].to_numpy(), events["timestamps"].to_numpy()
    split = split_by_user(user, time, settings.validation_percent, settings.test_percent)
    longest = settings.max_history or len(user)
    slices = request_slices(
        user,
        time,
        gap=settings.request_gap,
        max_candidates=settings.max_candidates,
        max_history=longest,
        apart=(split,),
    )
    if settings.evaluation_history == "frozen":
        slices = freeze_histories(slices, user, split, split != TRAIN, max_history=longest)
    rows = _rows(events, slices, users)
    events = events.with_columns(
        label_is_liked=(pl.col("rating") >= LIKED).cast(pl.Float32),
        label_rating=pl.col("rating").cast(pl.Float32),
    )
    writer = DatasetWriter(folder, _contents(users, actions), rows_per_group=rows_per_group)
    first = slices.candidate_start
    writer.write_splits(split[first], time[first], plain_table(events), slices, rows)
    sizes = writer.write_vocabularies(min_count=settings.min_count)
    return writer.write_schema({**about, "settings": dict(vars(settings))}, sizes)


def split_by_user(
    user: np.ndarray, time: np.ndarray, validation_percent: int, test_percent: int
) -> np.ndarray:
    """Returns the name of the split of each rating, [n] str; ratings are sorted by user and time.

    A user's rating number i of n (from 0) is a test rating if 100 i >= n (100 - test_percent), and so on. All
    ratings of a user with the same time go to the split of the first of them.

    Raises:
        ConfigError: nothing is left to train on.
    """
    if validation_percent + test_percent >= 100:
        raise ConfigError(
            f"--validation-percent {validation_percent} and --test-percent {test_percent} leave "
            "none to train on"
        )
    first = run_starts(user)
    counts = np.bincount(first, minlength=len(user))[first]
    place = 100 * (run_starts(user, time) - first)
    in_training = place < counts * (100 - validation_percent - test_percent)
    before_test = place < counts * (100 - test_percent)
    return np.where(in_training, TRAIN, np.where(before_test, VALIDATION, TEST))


def _contents(users: pl.DataFrame | None, actions: tuple[str | None, ...]) -> Contents:
    described = () if users is None else tuple(Feature(name, ("USER",)) for name in USER)
    return Contents(
        task="ranking",
        features=(
            Feature("item_id", SEQUENCE_SIDES),
            Feature("genres", SEQUENCE_SIDES, multi_valued=True),
            Feature("year", SEQUENCE_SIDES),
            *described,
        ),
        labels={"is_liked": "binary", "rating": "regression"},
        actions=actions,
    )


def _rows(events: pl.DataFrame, slices: Slices, users: pl.DataFrame | None) -> pl.DataFrame:
    """Returns the columns of the rows: keys, request time and features of the user."""
    rows = events[pl.Series(slices.candidate_start)].select(
        "user_id", request_id="order", request_time="timestamps"
    )
    if users is None:
        return rows
    twice = users.filter(pl.col("userId").is_duplicated())
    if twice.height:
        raise DataError(f"user {twice[0, 'userId']} occurs twice in the list of users")
    described = users.select(pl.col("userId").alias("user_id"), *USER)
    rows = rows.join(described, on="user_id", how="left", maintain_order="left")
    unknown = rows.filter(pl.col(USER[0]).is_null())
    if unknown.height:
        raise DataError(f"user {unknown[0, 'user_id']} has ratings but is not in the list of users")
    return rows
