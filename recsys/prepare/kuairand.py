"""Makes ranking data from KuaiRand (Pure or 1K): one row per request of a user, three labels and watch time.

    python -m recsys.prepare kuairand --input KuaiRand-Pure --output data/kuairand

Reads every log_standard*.csv[.gz], user_features*.csv and video_features_basic*.csv below --input. The
statistics of videos (video_features_statistic*) are not used: they are averages over the whole month,
including the test days.

- An impression that was logged twice counts once; otherwise it would have double weight in losses, metrics
  and histories. Copies are equal in every column that is read, including seconds and play time; at most their
  hour of logging differs.
- A request is a run of one user's impressions in one tab and on one day, each at most --request-gap seconds
  after the one before it, at most --max-candidates long. Kuaishou's own requests are not in the log.
- Its history is what the user did strictly before its first impression, in all tabs: the newest
  --max-history events.
- The last --test-days days (Beijing time) are the test split, the --validation-days before them validation,
  the rest training. A history reaches into earlier splits; labels do not.
- Histories of validation and test end where the split begins, as for scores computed the night before. With
  --evaluation-history live they reach up to each request; then GAUC means little, since the history of a
  user's second candidate holds the outcome of the first (the same model: GAUC of clicks .571 instead of .619,
  experiments/2026-11-22-small-figures).
- Counters are what was known about a candidate's video and author before its day: `item_impressions` (by all
  users of the log) and, for each binary label, `item_<label>_lift`, the log-odds of its smoothed rate minus
  those of all videos (0: average, or unknown; recsys/prepare/counters.py has the formula); `author_...`
  likewise. Events of the same day or later are not counted. In validation and test, counting stops where the
  split begins, as histories do (with --evaluation-history live: where the day begins). --no-counters leaves
  them out.
- Vocabularies hold the ids with at least --min-count training impressions; others, and empty values, share
  the row of unknown ids, because a model would memorize rarer ones. Ids themselves are kept as they are.
- Features of users are one snapshot for the whole month, as published.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from recsys.errors import ConfigError, DataError, shortened
from recsys.flags import positive
from recsys.prepare import command, ties
from recsys.prepare.counters import PRIOR_POSITIVES, count_before, counter_names
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
from recsys.prepare.rows import Slices, freeze_histories, request_slices
from recsys.prepare.starter_config import write_config
from recsys.prepare.text_tables import INTEGER, TEXT, find_files, fingerprints, id_column, read_csv
from recsys.prepare.ties import FILE, sort_events

LOGS, USERS, VIDEOS = "log_standard*.csv*", "user_features*.csv*", "video_features_basic*.csv*"
"""Name patterns of the files of a release that are read."""

ACTIONS = (
    "is_click",
    "is_like",
    "is_follow",
    "is_comment",
    "is_forward",
    "is_hate",
    "long_view",
    "is_profile_enter",
)
LOG = ("user_id", "video_id", "time_ms", "play_time_ms", "duration_ms", "tab", *ACTIONS)
VIDEO = {"author_id": INTEGER, "upload_type": TEXT, "tag": TEXT}
USER = (
    "user_active_degree",
    "is_live_streamer",
    "is_video_author",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
    *(f"onehot_feat{number}" for number in range(12)),
)
CONTENTS = Contents(
    task="ranking",
    features=(
        Feature("item_id", SEQUENCE_SIDES),
        Feature("author_id", SEQUENCE_SIDES),
        Feature("tag", SEQUENCE_SIDES, multi_valued=True),
        Feature("upload_type", SEQUENCE_SIDES),
        Feature("duration", SEQUENCE_SIDES, number=True),
        Feature("tab", ("USER", *SEQUENCE_SIDES)),
        Feature("hour", ("USER",)),
        *(Feature(name, ("USER",)) for name in USER),
    ),
    labels={"is_click": "binary", "long_view": "binary", "is_like": "binary", "watch_time": "regression"},
    actions=ACTIONS,
    watch_time=True,
)
COUNTED = {"item": "item_id", "author": "author_id"}
COUNTED_LABELS = tuple(name for name, kind in CONTENTS.labels.items() if kind == "binary")
COUNTERS = tuple(
    Feature(name, ("CANDIDATE",), number=True)
    for key in COUNTED
    for name in counter_names(key, COUNTED_LABELS)
)
ABOUT = {
    "source": "KuaiRand (C. Gao et al., CIKM 2022, arXiv 2208.08696), https://kuairand.com, zenodo 10439422",
    "licence": "CC BY-SA 4.0",
    "made_by": f"{command.PROGRAM} kuairand",
}
ABOUT_COUNTERS = {
    "columns": [counter.name for counter in COUNTERS],
    "counted": "impressions of earlier days; in validation and test those before the split (live: the day)",
    "lift": "logit((s + m) / (n + m / p)) - logit(p): n impressions, s with the label, p its share among all",
    "m": PRIOR_POSITIVES,
}
DAY_MS = 86_400_000
BEIJING_MS = 8 * 3_600_000


def main(arguments: list[str] | None = None) -> None:
    """Reads the files, cuts requests and writes the data set."""
    options = _options(arguments)
    with command.local_inputs(options, "input", patterns=(LOGS, USERS, VIDEOS)):
        _prepare(options)


def _prepare(options: argparse.Namespace) -> None:
    logs = find_files(options.input, LOGS, "the standard log")
    users = find_files(options.input, USERS, "user features")
    videos = find_files(options.input, VIDEOS, "video features")
    log, dropped = read_log(logs, modulus=options.user_modulus, ties=options.ties, seed=options.seed)
    tied = ties.TieCounter()
    tied.add(log["user_id"].to_numpy(), log["time_ms"].to_numpy())
    events = join_videos(log, videos)
    split = split_by_day(events["time_ms"], options.validation_days, options.test_days)
    contents = CONTENTS
    if options.counters:
        live = options.evaluation_history == "live"
        events = add_counters(events, split, live=live)
        contents = replace(CONTENTS, features=(*CONTENTS.features, *COUNTERS))
    slices = request_slices(
        events["user_id"].to_numpy(),
        events["time_ms"].to_numpy(),
        gap=options.request_gap * 1000,
        max_candidates=options.max_candidates,
        max_history=options.max_history,
        apart=(events["tab"].to_numpy(), _beijing_day(events["time_ms"]).to_numpy()),
    )
    if options.evaluation_history == "frozen":
        slices = freeze_histories(
            slices, events["user_id"].to_numpy(), split, split != TRAIN, max_history=options.max_history
        )
    rows = request_rows(events, slices, users)
    with command.output_folder(options.output, source=options.input, overwrite=options.overwrite) as folder:
        writer = DatasetWriter(folder, contents, rows_per_group=options.rows_per_group)
        first = slices.candidate_start
        time = events["time_ms"].to_numpy()[first]
        writer.write_splits(split[first], time, plain_table(events), slices, rows)
        sizes = writer.write_vocabularies(min_count=options.min_count)
        names = ("request_gap", "max_candidates", "max_history", "validation_days", "test_days")
        names += ("evaluation_history", "min_count", "user_modulus", "counters")
        about = ABOUT | {
            "inputs": fingerprints([*logs, *users, *videos]),
            "settings": {name: getattr(options, name) for name in names},
            "dropped": dropped,
            "ties": tied.describe(options.ties, options.seed),
        }
        if options.counters:
            about["counters"] = ABOUT_COUNTERS
        schema = writer.write_schema(about, sizes)
        write_config(schema, folder, options.output)
    for name, figures in schema["splits"].items():
        print(f"{name}: {figures['rows']} requests, {figures['candidates']} candidates")
    print(ties.report(schema["ties"]))
    command.print_next(options.output)


def read_log(
    files: list[Path], *, modulus: int = 1, ties: str = FILE, seed: int = 0
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Reads impressions, sorted by user and time with ties as `sort_events` orders them, and counts those
    that are left out."""
    pieces = [read_csv(path, dict.fromkeys(LOG, INTEGER)) for path in files]
    log = pl.concat(pieces).with_row_index("order").with_columns(pl.col("order").cast(pl.Int64))
    negative = log.filter(pl.min_horizontal(LOG) < 0)
    if negative.height:
        raise DataError(f"{files[0].name} and others: negative value in {negative.row(0, named=True)}")
    log = log.filter(pl.col("user_id") % modulus == 0)
    if not log.height:
        raise DataError(f"no impression is left with --user-modulus {modulus}")
    once = log.unique(subset=LOG, keep="first", maintain_order=True)
    dropped = {"impressions_logged_twice": log.height - once.height}
    return sort_events(once, "user_id", "time_ms", ties, seed), dropped


def join_videos(log: pl.DataFrame, files: list[Path]) -> pl.DataFrame:
    """Joins impressions with their videos and makes the columns that rows are cut from."""
    kinds = {"video_id": INTEGER, **VIDEO}
    videos = pl.concat([read_csv(path, kinds) for path in files])
    if videos["video_id"].is_duplicated().any():
        raise DataError(
            f"{files[0]}: video_id {videos.filter(pl.col('video_id').is_duplicated())[0, 0]} occurs twice"
        )
    tags = _tags(videos["tag"])
    wrong = tags.list.eval(pl.element().is_null()).list.any().fill_null(True).arg_true()
    if len(wrong):
        raise DataError(
            f"{files[0]} or another list of videos: tag of video {videos[wrong[0], 'video_id']} is "
            f"{shortened(videos[wrong[0], 'tag'])}, expected integers with commas between them"
        )
    videos = videos.with_columns(tag=tags)
    events = log.join(videos, on="video_id", how="left", maintain_order="left")
    unknown = events.filter(pl.col("author_id").is_null())
    if unknown.height:
        raise DataError(
            f"video {unknown[0, 'video_id']} of the log is not in {', '.join(f.name for f in files)}"
        )
    actions = pl.sum_horizontal(
        (pl.col(name) > 0).cast(pl.Int64) * (1 << bit) for bit, name in enumerate(ACTIONS)
    )
    seconds = (pl.col("play_time_ms") / 1000).cast(pl.Float32)
    return events.select(
        "user_id",
        "time_ms",
        "order",
        "author_id",
        "upload_type",
        "tab",
        item_id="video_id",
        timestamps=pl.col("time_ms") // 1000,
        tag="tag",
        duration=(pl.col("duration_ms") / 1000).cast(pl.Float32),
        actions=actions,
        watch_time=seconds,
        label_is_click=pl.col("is_click").cast(pl.Float32),
        label_long_view=pl.col("long_view").cast(pl.Float32),
        label_is_like=pl.col("is_like").cast(pl.Float32),
        label_watch_time=seconds,
    )


def _tags(texts: pl.Series) -> pl.Series:
    """Splits tags at commas into lists of integers; a tag that is not an integer becomes null."""
    empty = pl.lit([], pl.List(pl.String))
    lists = pl.when(texts == "").then(empty).otherwise(texts.str.split(","))
    return pl.select(tag=lists.cast(pl.List(pl.Int64), strict=False))["tag"]


def split_by_day(time_ms: pl.Series, validation_days: int, test_days: int) -> np.ndarray:
    """Returns the name of the split of each time, [n] str, by days of Beijing time from the last one on."""
    day = _beijing_day(time_ms).to_numpy()
    before_end = day.max() - day
    if before_end.max() < validation_days + test_days:
        raise ConfigError(
            f"the log spans {before_end.max() + 1} days; --validation-days {validation_days} and --test-days "
            f"{test_days} leave none to train on"
        )
    return np.where(
        before_end < test_days, TEST, np.where(before_end < test_days + validation_days, VALIDATION, TRAIN)
    )


def add_counters(events: pl.DataFrame, split: np.ndarray, *, live: bool) -> pl.DataFrame:
    """Adds the columns of `COUNTERS`, counted before each event's day, or before its split unless `live`."""
    day = _beijing_day(events["time_ms"])
    period = pl.DataFrame({"day": day, "split": split})
    if not live:
        began = pl.when(pl.col("split") == TRAIN).then("day").otherwise(pl.col("day").min().over("split"))
        period = period.select(day=began)
    timed = events.with_columns(period=period["day"])
    counters = [
        count_before(timed, key=key, column=column, labels=COUNTED_LABELS) for key, column in COUNTED.items()
    ]
    return events.hstack([column for frame in counters for column in frame])


def request_rows(events: pl.DataFrame, slices: Slices, user_files: list[Path]) -> pl.DataFrame:
    """Makes the columns of the rows: keys, request time, tab, hour and the features of each user."""
    kinds = {"user_id": INTEGER, **dict.fromkeys(USER, TEXT)}
    users = pl.concat([read_csv(path, kinds) for path in user_files])
    if users["user_id"].is_duplicated().any():
        twice = users.filter(pl.col("user_id").is_duplicated())[0, "user_id"]
        raise DataError(f"{user_files[0]}: user_id {twice} occurs twice")
    users = users.with_columns(id_column(users[name]).alias(name) for name in USER)
    first = events[pl.Series(slices.candidate_start)]
    hour = (pl.col("time_ms") + BEIJING_MS) % DAY_MS // 3_600_000
    rows = first.select("user_id", request_id="order", request_time="timestamps", tab="tab", hour=hour).join(
        users, on="user_id", how="left", maintain_order="left"
    )
    unknown = rows.filter(pl.col(USER[0]).is_null())
    if unknown.height:
        raise DataError(
            f"user {unknown[0, 'user_id']} of the log is not in {', '.join(f.name for f in user_files)}"
        )
    return rows


def _beijing_day(time_ms: pl.Series) -> pl.Series:
    return (time_ms + BEIJING_MS) // DAY_MS


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("kuairand", __doc__)
    parser.add_argument(
        "--request-gap", type=positive, default=60, help="longest pause within a request, in seconds"
    )
    parser.add_argument("--max-candidates", type=positive, default=10, help="most candidates per request")
    parser.add_argument(
        "--max-history", type=positive, default=200, help="most events per history, the newest ones"
    )
    parser.add_argument("--validation-days", type=positive, default=2)
    parser.add_argument("--test-days", type=positive, default=2)
    command.add_evaluation_history(parser)
    parser.add_argument(
        "--min-count", type=positive, default=5, help="number of training impressions that make an id known"
    )
    parser.add_argument(
        "--user-modulus",
        type=positive,
        default=1,
        help="keep only users whose id is divisible by this",
    )
    parser.add_argument(
        "--no-counters",
        dest="counters",
        action="store_false",
        help="leave out the counters of videos and authors",
    )
    ties.add_flags(parser, [name for name in LOG if name not in ("user_id", "time_ms")])
    return parser.parse_args(arguments)
