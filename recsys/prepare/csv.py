"""Makes training data from any log of interactions: a line an event, with a user, an item and a time.

    python scripts/prepare_csv.py --input clicks.csv.gz --output data/clicks --task retrieval \\
        --user-column uid --item-column sku --time-column ts --time-unit ms
    python scripts/prepare_csv.py --input log.parquet --output data/log --task ranking \\
        --user-column uid --item-column sku --time-column when --time-unit iso \\
        --label click=clicked --label seconds=dwell:regression --action click=clicked --item-feature brand

    python scripts/prepare_csv.py --input Beauty.txt --sequence-times Beauty_times.txt --output data/beauty \\
        --task retrieval --sequences --min-user-events 5 --min-item-events 5

--input is a .csv, .tsv (also .gz) or .parquet file, or a folder of them. With --sequences it is a text file
with a line a user, `user item item ...`, oldest first; --sequence-times names a file of the same form with
the times, and without it the events of a user are numbered, as if a second lay between them. Then train with
`python -m recsys.train --config <output>/starter.config --run-dir runs/<name>`.

- Ids stay as they are: int64 when every one is a whole number, else text.
- Every line is an event. Events are ordered by user and time, equal times in the order of the input.
- ranking: a request is a run of one user's events, each at most --session-gap seconds behind the one before
  it, cut after --max-candidates; its history is what the user did strictly before. The latest --test-share of
  all events is the test split, the --validation-share before it validation; their histories end where the
  split begins, or with --evaluation-history live at each request (then within-user metrics mean little: the
  history of a second candidate holds the outcome of the first). Vocabularies count training only.
- retrieval: leave-one-out. The last item of a user is the test target, the one before it the validation
  target. The catalogue is every item of the log. Users with one or two events only train. The folder
  `latest` has the whole history of every user, to make recommendations from. --min-user-events and
  --min-item-events leave out users and items with fewer events, again and again until all have as many
  (a k-core). With features of items `items.parquet` has those of the whole catalogue, each as in the item's
  last event, for `retriever { item_encoder }`.
- An empty cell of a feature is the unknown id; an empty user, item, time or number is an error.

Memory: the log is cut by user into parts of at most about --part-rows events, worked on one at a time;
besides that, the ids of the vocabularies must fit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import polars as pl

from recsys.errors import ConfigError, DataError
from recsys.flags import positive
from recsys.prepare import common
from recsys.prepare.events import Log, LogColumns, cut_log
from recsys.prepare.items import items_of, join_items, write_items
from recsys.prepare.rows import (
    TEST,
    TRAIN,
    VALIDATION,
    Contents,
    DatasetWriter,
    Feature,
    freeze_histories,
    holdout_slices,
    plain_table,
    request_slices,
)
from recsys.prepare.sequences import ITEM, TIME, USER
from recsys.prepare.starter_config import write_config

SECOND = 1_000_000
"""Times are kept in microseconds until rows are cut."""
SIDES = ("HISTORY", "CANDIDATE")
EARLIEST_YEAR = 1980
"""Logs that end before it have probably been read with a wrong unit of time."""

LATEST = "latest"
"""Rows to predict on: what there is to know of each user at the end of the log."""


def main(arguments: list[str] | None = None) -> None:
    """Cuts the log by user, then makes rows part by part; see the head of this file."""
    options = _options(arguments)
    columns = _columns(options)
    contents = _contents(options, columns)
    with common.output_folder(options.output, overwrite=options.overwrite) as folder:
        with tempfile.TemporaryDirectory(prefix=".parts-", dir=folder) as parts:
            log = cut_log(options.input, columns, Path(parts), part_rows=options.part_rows)
            if max(options.min_user_events, options.min_item_events) > 1:
                log.keep_core(options.min_user_events, options.min_item_events)
            writer = DatasetWriter(folder, contents, rows_per_group=options.rows_per_group)
            catalogue = []
            bounds = log.time_quantiles(
                1 - options.validation_share - options.test_share, 1 - options.test_share
            )
            for number in range(len(log.parts)):
                events = log.part(number)
                if not events.height:
                    continue
                if options.task == "ranking":
                    _write_ranking(writer, events, number, bounds, options)
                else:
                    _write_retrieval(writer, events, number, log.last_time // SECOND, options)
                    catalogue.append(items_of(events, [one.name for one in contents.features[1:]]))
        for split in (TRAIN, VALIDATION, TEST):
            if split not in writer.splits:
                raise DataError(f"{options.input}: no rows for the {split} split; {_remedy(options.task)}")
        items = join_items(catalogue) if catalogue else None
        if items is not None and items.width > 1:
            write_items(folder, items)
        sizes = writer.write_vocabularies(
            min_count=options.min_count, catalogue=None if items is None else {"item_id": items["item_id"]}
        )
        schema = writer.write_schema(_about(options, columns, log), sizes)
        write_config(schema, folder, options.output)
    for name, noted in schema["splits"].items():
        print(f"{name}: {noted['rows']} rows, {noted['candidates']} candidates")
    if not options.sequences:
        print(_when(log, options.time_unit))
    common.print_next(options.output)


def _when(log: Log, unit: str) -> str:
    """The first and last time, by which a wrong --time-unit shows: seconds read as ms are of January 1970."""
    first, last = (
        datetime.fromtimestamp(time // SECOND, timezone.utc) for time in (log.first_time, log.last_time)
    )
    doubt = f"; is --time-unit {unit} right?" if last.year < EARLIEST_YEAR else ""
    return f"events from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC{doubt}"


def _write_ranking(
    writer: DatasetWriter, events: pl.DataFrame, number: int, bounds: list[int], options: argparse.Namespace
) -> None:
    """Rows of one part, in the order of time within the part."""
    time = events["time_us"].to_numpy()
    split = np.searchsorted(np.array(bounds), time, side="right")
    user = events["user_id"].rle_id().to_numpy()
    slices = request_slices(
        user,
        time,
        gap=options.session_gap * SECOND,
        max_candidates=options.max_candidates,
        max_history=options.max_history,
        apart=(split,),
    )
    if options.evaluation_history == "frozen":
        slices = freeze_histories(slices, user, split, split > 0, max_history=options.max_history)
    user_features = [one.name for one in writer.contents.features if one.sides == ("USER",)]
    first = events[pl.Series(slices.candidate_start)]
    rows = first.select("user_id", *user_features, request_id="order", request_time="timestamps")
    rows = rows.select("user_id", "request_id", "request_time", *user_features)
    table = plain_table(events)
    for place, name in enumerate((TRAIN, VALIDATION, TEST)):
        index = np.flatnonzero(split[slices.candidate_start] == place)
        index = index[np.argsort(time[slices.candidate_start[index]], kind="stable")]
        if len(index):
            chosen = plain_table(rows[pl.Series(index)])
            writer.write(name, f"{name}/part-{number:05d}.parquet", table, slices.take(index), chosen)


def _write_retrieval(
    writer: DatasetWriter, events: pl.DataFrame, number: int, now: int, options: argparse.Namespace
) -> None:
    """Leave-one-out rows of one part, in the order of users, and their whole histories as of `now`."""
    user = events["user_id"].rle_id().to_numpy()
    table = plain_table(events)
    for split, held_out in (
        (TRAIN, 2),
        ("train_validation", 1),
        (VALIDATION, 2),
        (TEST, 1),
        (LATEST, 0),
    ):
        with_candidate = split in (VALIDATION, TEST)
        slices = holdout_slices(
            user, held_out=held_out, with_candidate=with_candidate, max_history=options.max_history
        )
        # A training row needs a first event to predict the second from.
        fewest = 1 if with_candidate or split == LATEST else 2
        enough = np.flatnonzero(slices.history_end - slices.history_start >= fewest)
        slices = slices.take(enough)
        if not len(enough):
            continue
        moment = slices.candidate_start if with_candidate else slices.history_end - 1
        rows = events[pl.Series(moment)].select("user_id", request_time="timestamps")
        if split == LATEST:
            rows = rows.with_columns(request_time=pl.lit(now, pl.Int64))
        writer.write(split, f"{split}/part-{number:05d}.parquet", table, slices, plain_table(rows))


def _remedy(task: str) -> str:
    if task == "ranking":
        return "events must differ in time; change --validation-share or --test-share"
    return "some user needs at least 3 events"


def _columns(options: argparse.Namespace) -> LogColumns:
    for flag, pairs in (("--label", options.label), ("--action", options.action)):
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{flag} {name}=...: given {names.count(name)} times; names must differ")
    labels = dict(options.label)
    if options.task == "ranking" and not labels:
        raise ConfigError(
            "--task ranking needs at least one --label NAME=COLUMN, for example --label click=is_click"
        )
    if options.task == "retrieval" and labels:
        raise ConfigError(
            "--task retrieval predicts the next item and takes no --label; --action can carry feedback"
        )
    named = {"--user-column": options.user_column, "--item-column": options.item_column}
    named["--time-column"] = options.time_column
    if options.sequences:
        return _sequences(options, named)
    if options.sequence_times:
        raise ConfigError("--sequence-times belongs to --sequences; a log has its times in --time-column")
    if missing := [flag for flag, column in named.items() if not column]:
        raise ConfigError(f"{', '.join(missing)}: not given; name the column, or use --sequences")
    if options.task == "ranking" and max(options.min_user_events, options.min_item_events) > 1:
        raise ConfigError("--min-user-events and --min-item-events are for --task retrieval")
    return LogColumns(
        user=options.user_column,
        item=options.item_column,
        time=options.time_column,
        time_unit=options.time_unit,
        delimiter=options.delimiter,
        ids=(*options.item_feature, *options.user_feature),
        numbers=(*options.item_number, *options.user_number),
        labels={name: column.removesuffix(":regression") for name, column in labels.items()},
        regression=frozenset(name for name, column in labels.items() if column.endswith(":regression")),
        actions=dict(options.action),
        watch_time=options.watch_time_column,
        watch_time_scale=0.001 if options.watch_time_unit == "ms" else 1.0,
    )


def _sequences(options: argparse.Namespace, named: dict[str, str | None]) -> LogColumns:
    """Columns of a file with a line a user."""
    if options.task != "retrieval":
        raise ConfigError(
            "--sequences is for --task retrieval: such a file says what came next and nothing else"
        )
    columns = options.item_feature + options.user_feature + options.item_number + options.user_number
    columns += [column for _, column in options.action] + [options.watch_time_column, options.delimiter]
    if given := [flag for flag, column in named.items() if column] or [one for one in columns if one]:
        raise ConfigError(f"{given[0]} does not go with --sequences: such a file has no columns")
    return LogColumns(
        USER,
        ITEM,
        TIME,
        time_unit=options.time_unit if options.sequence_times else "s",
        sequences=True,
        sequence_times=options.sequence_times,
    )


def _contents(options: argparse.Namespace, columns: LogColumns) -> Contents:
    user = options.user_feature + options.user_number
    if options.task == "retrieval" and user:
        raise ConfigError(
            f"--task retrieval does not use features of users ({', '.join(user)}); leave them out"
        )
    features = (
        Feature("item_id", SIDES),
        *(Feature(name, SIDES) for name in options.item_feature),
        *(Feature(name, SIDES, number=True) for name in options.item_number),
        *(Feature(name, ("USER",)) for name in options.user_feature),
        *(Feature(name, ("USER",), number=True) for name in options.user_number),
    )
    names = [one.name for one in features] + list(columns.labels)
    taken = {
        "user_id",
        "request_id",
        "request_time",
        "timestamps",
        "order",
        "time_us",
        "actions",
        "watch_time",
    }
    for name in names:
        if names.count(name) > 1 or name in taken:
            raise ConfigError(
                f"{name!r} would stand for two columns of the output; rename or leave out one of them"
            )
    return Contents(
        task=options.task,
        features=features,
        labels={n: "regression" if n in columns.regression else "binary" for n in columns.labels},
        actions=tuple(columns.actions),
        watch_time=columns.watch_time is not None,
    )


def _about(options: argparse.Namespace, columns: LogColumns, log: Log) -> dict:
    shown = ("task", "session_gap", "max_candidates", "max_history", "validation_share", "test_share")
    shown += ("evaluation_history", "min_count", "part_rows", "sequences", "min_user_events")
    shown += ("min_item_events",)
    return {
        "source": "a log of one's own",
        "licence": "",
        "made_by": "scripts/prepare_csv.py",
        "inputs": common.fingerprints(log.files),
        "settings": {name: getattr(options, name) for name in shown},
        "input_columns": {
            "user_id": columns.user,
            "item_id": columns.item,
            "timestamps": columns.time,
            **({"watch_time": columns.watch_time} if columns.watch_time else {}),
            **{f"candidate_{name}": column for name, column in columns.labels.items()},
            **{f"action {name}": column for name, column in columns.actions.items()},
        },
        "input_rows": log.num_rows,
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--task", choices=("ranking", "retrieval"), required=True)
    for side in ("user", "item", "time"):
        parser.add_argument(f"--{side}-column", help="needed unless --sequences is given")
    parser.add_argument("--sequences", action="store_true", help="a line of --input is a user with all items")
    parser.add_argument("--sequence-times", type=Path, metavar="FILE", help="the times of --sequences")
    parser.add_argument("--time-unit", choices=("s", "ms", "us", "iso"), default="s")
    parser.add_argument("--delimiter", type=_delimiter, help=r"of a text file; default: , and \t for .tsv")
    parser.add_argument(
        "--label", type=_pair, action="append", default=[], metavar="NAME=COLUMN[:regression]",
        help="what to predict: 0 or 1, or with :regression any number",
    )  # fmt: skip
    parser.add_argument(
        "--action", type=_pair, action="append", default=[], metavar="NAME=COLUMN",
        help="a bit of the history's actions, set where the column is above 0",
    )  # fmt: skip
    parser.add_argument("--watch-time-column", help="how long an item was used")
    parser.add_argument("--watch-time-unit", choices=("s", "ms"), default="s")
    for side in ("item", "user"):
        for kind, what in (("feature", "a category"), ("number", "a number")):
            parser.add_argument(
                f"--{side}-{kind}",
                action="append",
                default=[],
                metavar="COLUMN",
                help=f"{what} of the {side}",
            )
    parser.add_argument(
        "--session-gap", type=positive, default=60, help="longest pause in a request, seconds"
    )
    parser.add_argument("--max-candidates", type=positive, default=10, help="most candidates of a request")
    parser.add_argument("--max-history", type=positive, default=200, help="newest events of a history")
    parser.add_argument("--validation-share", type=_share, default=0.1)
    parser.add_argument("--test-share", type=_share, default=0.1)
    common.add_evaluation_history(parser)
    parser.add_argument("--min-count", type=positive, default=1, help="training events of a known id")
    for side in ("user", "item"):
        parser.add_argument(
            f"--min-{side}-events",
            type=positive,
            default=1,
            help=f"leave out a {side} with fewer (retrieval)",
        )
    parser.add_argument("--part-rows", type=positive, default=2_000_000, help="events in memory at a time")
    return parser.parse_args(arguments)


def _pair(text: str) -> tuple[str, str]:
    name, mark, column = text.partition("=")
    if not (name.isidentifier() and mark and column):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COLUMN with a name of letters, digits and _")
    return name, column


def _delimiter(text: str) -> str:
    text = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(text) != 1 or not text.isascii() or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{text!r} is not one ASCII character other than a quote")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 0.5")
    return share


if __name__ == "__main__":
    sys.exit(common.run(main))
