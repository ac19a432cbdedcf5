"""Makes training data from any log of interactions: one line per event, with a user, an item and a time.

    python -m recsys.prepare csv --input clicks.csv.gz --output data/clicks --task retrieval \\
        --user-column uid --item-column sku --time-column ts --time-unit ms
    python -m recsys.prepare csv --input log.parquet --output data/log --task ranking \\
        --user-column uid --item-column sku --time-column when --time-unit iso \\
        --label click=clicked --label seconds=dwell:regression --action click=clicked --item-feature brand

--input is a .csv, .tsv (also .gz) or .parquet file, or a folder of them: a path, or an address such as
https://host/clicks.csv.gz or s3://bucket/logs (also gs://, az://, hf:// and whatever else fsspec reads).
Files at an address are first downloaded beside --output, and removed at the end. Then train with
`python -m recsys.train --config <output>/starter.config --run-dir runs/<name>`.

- Ids are kept as they are: int64 if every one is a whole number, else text.
- Every line is an event. Events are ordered by user and time, equal times in the order of the input, shuffled
  (--ties shuffle) or by another column (--ties COLUMN). schema.json has the share of events with equal times.
- ranking: a request is a run of one user's events, each at most --session-gap seconds after the one before
  it, cut after --max-candidates; its history is what the user did strictly before. The latest --test-share of
  all events is the test split, the --validation-share before it validation; their histories end where the
  split begins, or with --evaluation-history live at each request (then within-user metrics mean little: the
  history of a second candidate holds the outcome of the first). Vocabularies count training only.
- ranking, --candidates FILE: the folder `latest` has the rows to score now; run `python -m recsys.predict
  --run-dir runs/<name> --input <output>/latest` to score them. FILE has a line for each candidate, with the
  columns of user and item as in the log, and any columns of features. A row of `latest` is a user with the
  whole history and all candidates, at the time of the log's last event; where FILE has features of users,
  such as the place or the device, each combination of them is a row. Features that are not in FILE are taken
  from the last event of the item or user. Items and users without an event count as unknown; their numbers
  need a column or --fill.
- retrieval: leave-one-out. The last item of a user is the test target, the one before it the validation
  target. The catalogue is every item of the log. Users with one or two events only train. The folder
  `latest` has the whole history of every user, to make recommendations from. --min-user-events and
  --min-item-events leave out users and items with fewer events, repeatedly until all that remain
  have enough (a k-core). If items have features, `items.parquet` has those of the whole catalogue, each from
  the item's last event, for `retriever { item_encoder }`.
- An empty cell of a feature is the unknown id; an empty user, item, time or number is an error, unless --fill
  gives its value. --item-list and --user-list take cells of several categories (a|b|c, or a
  list in a parquet file).
- A label or an action may be a condition: --label 'liked=rating>=4', --action 'bought=event==purchase'.

Memory: the log is cut by user into parts of at most about --part-rows events, worked on one at a time;
besides that, the ids of the vocabularies and the candidates must fit.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from datetime import datetime, timezone

from recsys.errors import ConfigError, shortened
from recsys.flags import positive
from recsys.prepare import command, ties
from recsys.prepare.candidates import read_candidates
from recsys.prepare.conditions import Signal
from recsys.prepare.dataset_writer import SEQUENCE_SIDES, Contents, Feature
from recsys.prepare.downloads import location
from recsys.prepare.events import Log
from recsys.prepare.log_columns import SECOND, TIME_UNITS, LogColumns
from recsys.prepare.log_dataset import LogInput, LogSettings, make_dataset
from recsys.prepare.log_files import ENDINGS, find_logs, read_log

EARLIEST_YEAR = 1980
"""A log that ends before this year was probably read with a wrong unit of time."""

ABOUT = {
    "source": "a log of your own",
    "licence": "",
    "made_by": f"{command.PROGRAM} csv",
}

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Matches the names that the config language accepts."""

MOST_ACTIONS = 63
"""Number of bits of `actions` (int64) that can stand for an action."""

RESERVED = frozenset(
    {"user_id", "request_id", "request_time", "timestamps", "order", "time_us", "actions", "watch_time"}
)
"""Names of columns that every data set may have; no feature or label can take them."""


def main(arguments: list[str] | None = None) -> None:
    """Cuts the log by user, then makes rows part by part."""
    options = _options(arguments)
    columns = _columns(options)
    contents = _contents(options, columns)
    settings = LogSettings(**{field.name: getattr(options, field.name) for field in fields(LogSettings)})
    patterns = [f"*{ending}" for ending in ENDINGS]
    with command.local_inputs(options, "input", "candidates", patterns=patterns, maxdepth=1):
        files = find_logs(options.input)
        pieces = (piece for path in files for piece in read_log(path, columns))
        log_input = LogInput(options.input, files, columns, pieces)
        if options.candidates is not None:
            candidates = read_candidates(options.candidates, columns)
            log_input = log_input._replace(candidates=candidates, files=[*files, options.candidates])
        log = make_dataset(log_input, contents, settings, ABOUT, options)
    print(_time_range(log, options.time_unit))
    command.print_next(options.output)


def _time_range(log: Log, unit: str) -> str:
    """Describes the first and last time, which reveals a wrong --time-unit: seconds read as ms give 1970."""
    first, last = (
        datetime.fromtimestamp(time // SECOND, timezone.utc) for time in (log.first_time, log.last_time)
    )
    doubt = f"; is --time-unit {unit} right?" if last.year < EARLIEST_YEAR else ""
    return f"events from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC{doubt}"


def _columns(options: argparse.Namespace) -> LogColumns:
    given: dict[str, str] = {}
    for side in ("user", "item", "time"):
        column = getattr(options, f"{side}_column")
        if column in given:
            raise ConfigError(
                f"--{side}-column {column}: is the column of --{given[column]}-column; name another one"
            )
        given[column] = side
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
    if options.task == "retrieval" and options.candidates is not None:
        raise ConfigError(
            "--candidates is for --task ranking; with --task retrieval all items are candidates of the users "
            "in `latest`"
        )
    if options.task == "ranking" and max(options.min_user_events, options.min_item_events) > 1:
        raise ConfigError("--min-user-events and --min-item-events are for --task retrieval")
    for name, text in labels.items():
        if text.endswith(":regression") and _signal("--label", text.removesuffix(":regression")).sign:
            raise ConfigError(f"--label {name}={text}: a condition is 0 or 1; leave out :regression")
    return LogColumns(
        user=options.user_column,
        item=options.item_column,
        time=options.time_column,
        time_unit=options.time_unit,
        delimiter=options.delimiter,
        ids=(*options.item_feature, *options.user_feature),
        numbers=(*options.item_number, *options.user_number),
        lists=(*options.item_list, *options.user_list),
        list_delimiter=options.list_delimiter,
        fills=dict(options.fill),
        labels={name: _signal("--label", text.removesuffix(":regression")) for name, text in labels.items()},
        regression=frozenset(name for name, column in labels.items() if column.endswith(":regression")),
        actions={name: _signal("--action", text) for name, text in options.action},
        watch_time=options.watch_time_column,
        watch_time_scale=0.001 if options.watch_time_unit == "ms" else 1.0,
        ties=options.ties,
        seed=options.seed,
    )


def _contents(options: argparse.Namespace, columns: LogColumns) -> Contents:
    user = options.user_feature + options.user_list + options.user_number
    if options.task == "retrieval" and user:
        raise ConfigError(
            f"--task retrieval does not use features of users ({', '.join(user)}); leave them out"
        )
    features = (
        Feature("item_id", SEQUENCE_SIDES),
        *(Feature(name, SEQUENCE_SIDES) for name in options.item_feature),
        *(Feature(name, SEQUENCE_SIDES, multi_valued=True) for name in options.item_list),
        *(Feature(name, SEQUENCE_SIDES, number=True) for name in options.item_number),
        *(Feature(name, ("USER",)) for name in options.user_feature),
        *(Feature(name, ("USER",), multi_valued=True) for name in options.user_list),
        *(Feature(name, ("USER",), number=True) for name in options.user_number),
    )
    _check_names(features, columns)
    return Contents(
        task=options.task,
        features=features,
        labels={name: "regression" if name in columns.regression else "binary" for name in columns.labels},
        actions=tuple(columns.actions),
        watch_time=columns.watch_time is not None,
    )


def _check_names(features: tuple[Feature, ...], columns: LogColumns) -> None:
    """Checks that the config language accepts every name, and that no name stands for two columns.

    Raises:
        ConfigError: a name breaks these rules.
    """
    events = [*(feature.name for feature in features), *columns.labels]
    events += [f"label_{name}" for name in columns.labels]
    for name in events:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{shortened(name)} cannot be the name of a feature or label, which has ASCII letters, "
                "digits and _, no digit first; rename the column"
            )
        if events.count(name) > 1 or name in RESERVED:
            raise ConfigError(
                f"{name!r} would stand for two columns of the output; rename or leave out one of them"
            )
    for feature in features:
        if feature.sides == ("USER",) and feature.name.startswith(("uih_", "candidate_")):
            raise ConfigError(
                f"{feature.name!r} would stand for two columns of the output: a user's feature does not "
                "begin with uih_ or candidate_; rename the column"
            )
    if len(columns.actions) > MOST_ACTIONS:
        raise ConfigError(
            f"--action: given {len(columns.actions)} times; there is room for {MOST_ACTIONS} bits"
        )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("csv", __doc__)
    parser.add_argument("--task", choices=("ranking", "retrieval"), required=True)
    for side in ("user", "item", "time"):
        parser.add_argument(f"--{side}-column", required=True, help=f"column with the {side} of each event")
    parser.add_argument(
        "--time-unit", choices=TIME_UNITS, default="s", help="unit of times since 1970, or dates as text"
    )
    parser.add_argument(
        "--delimiter", type=_delimiter, help=r"delimiter of text files; default: , and \t for .tsv"
    )
    parser.add_argument(
        "--label", type=_pair, action="append", default=[], metavar="NAME=COLUMN[>=VALUE|:regression]",
        help="what to predict: a column of 0 and 1, a condition such as 'liked=rating>=4' or "
        "'bought=event==purchase' (>= > <= < == !=), or with :regression any number",
    )  # fmt: skip
    parser.add_argument(
        "--action", type=_pair, action="append", default=[], metavar="NAME=COLUMN[>=VALUE]",
        help="a bit of the history's actions, set where the column is above 0, or where a condition holds",
    )  # fmt: skip
    parser.add_argument("--watch-time-column", help="column with the watch time of each event")
    parser.add_argument("--watch-time-unit", choices=("s", "ms"), default="s", help="unit of that column")
    for side in ("item", "user"):
        kinds = (("feature", "a category"), ("list", "several categories"), ("number", "a number"))
        for kind, content in kinds:
            parser.add_argument(
                f"--{side}-{kind}",
                action="append",
                default=[],
                metavar="COLUMN",
                help=f"column with {content} of each {side}",
            )
    parser.add_argument("--list-delimiter", default="|", help="text between the categories of a cell")
    parser.add_argument(
        "--fill", type=_fill, action="append", default=[], metavar="COLUMN=VALUE",
        help="value that replaces empty cells of a column",
    )  # fmt: skip
    parser.add_argument(
        "--candidates", type=location, metavar="FILE",
        help="users and items to score now, one pair per line, with any of the features; see above (ranking)",
    )  # fmt: skip
    parser.add_argument(
        "--session-gap", type=positive, default=60, help="longest pause within a request, in seconds"
    )
    parser.add_argument("--max-candidates", type=positive, default=10, help="most candidates per request")
    parser.add_argument(
        "--max-history", type=positive, default=200, help="most events per history, the newest"
    )
    parser.add_argument(
        "--validation-share",
        type=_share,
        default=0.1,
        help="share of all events, the latest ones before the test split, for validation (ranking)",
    )
    parser.add_argument(
        "--test-share",
        type=_share,
        default=0.1,
        help="share of all events, the latest ones, for test (ranking)",
    )
    command.add_evaluation_history(parser)
    parser.add_argument(
        "--min-count", type=positive, default=1, help="number of training events that make an id known"
    )
    command.add_core(parser, " (retrieval)")
    command.add_part_rows(parser)
    ties.add_flags(parser, None)
    return parser.parse_args(arguments)


def _signal(flag: str, text: str) -> Signal:
    try:
        return Signal.parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag} ...={text}: {error}") from error


def _fill(text: str) -> tuple[str, str]:
    column, mark, value = text.partition("=")
    if not (column and mark and value):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not COLUMN=VALUE")
    return column, value


def _pair(text: str) -> tuple[str, str]:
    name, mark, column = text.partition("=")
    if not (NAME.fullmatch(name) and mark and column):
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is not NAME=COLUMN with a name of letters, digits and _"
        )
    return name, column


def _delimiter(text: str) -> str:
    text = {"\\t": "\t", "tab": "\t"}.get(text, text)
    if len(text) != 1 or not text.isascii() or text in '"\r\n':
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not one ASCII character other than a quote")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 0.5:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is not a share between 0 and 0.5")
    return share
