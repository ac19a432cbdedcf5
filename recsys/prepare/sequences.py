"""Makes next-item data from text files with one line per user, the form in which benchmarks are often shared.

    python -m recsys.prepare sequences --input Beauty.txt --times Beauty_times.txt --output data/beauty \\
        --min-user-events 5 --min-item-events 5

A line of --input is `user item item ...`, separated by spaces, oldest event first; --times names a file of
the same form with the times: `user time time ...`. Without it, the events of a user count as one
second apart. Both may end in .gz. Then train with
`python -m recsys.train --config <output>/starter.config --run-dir runs/<name>`.

- Ids are kept as they are: int64 if every one is a whole number, else text.
- Splits are leave-one-out: the last item of a user is the test target, the one before it the validation
  target. The catalogue is every item of the file. Users with one or two events only train. The folder
  `latest` has the whole history of every user, to make recommendations from.
- --min-user-events and --min-item-events leave out users and items with fewer events, repeatedly until
  all that remain have enough (a k-core).

Memory: events are cut by user into parts of at most about --part-rows events, worked on one at a time;
besides that, the ids of the vocabulary must fit.
"""

from __future__ import annotations

import argparse

from recsys.errors import ConfigError
from recsys.flags import positive
from recsys.prepare import command, ties
from recsys.prepare.dataset_writer import SEQUENCE_SIDES, Contents, Feature
from recsys.prepare.downloads import location
from recsys.prepare.log_columns import TIME_UNITS, LogColumns
from recsys.prepare.log_dataset import LogInput, LogSettings, make_dataset
from recsys.prepare.sequence_files import ITEM, TIME, USER, read_sequences

ABOUT = {
    "source": "a log of your own",
    "licence": "",
    "made_by": f"{command.PROGRAM} sequences",
}


def main(arguments: list[str] | None = None) -> None:
    """Reads the files and makes a data set from them."""
    options = _options(arguments)
    with command.local_inputs(options, "input", "times"):
        _prepare(options)


def _prepare(options: argparse.Namespace) -> None:
    unit = options.time_unit if options.times else "s"
    log_input = LogInput(
        path=options.input,
        files=[options.input, *([options.times] if options.times else [])],
        columns=LogColumns(USER, ITEM, TIME, ties=options.ties, seed=options.seed),
        pieces=read_sequences(options.input, options.times, unit),
    )
    settings = LogSettings(
        task="retrieval",
        max_history=options.max_history,
        part_rows=options.part_rows,
        min_user_events=options.min_user_events,
        min_item_events=options.min_item_events,
        ties=options.ties,
        seed=options.seed,
    )
    contents = Contents(task="retrieval", features=(Feature("item_id", SEQUENCE_SIDES),))
    make_dataset(log_input, contents, settings, ABOUT, options)
    command.print_next(options.output)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("sequences", __doc__)
    parser.add_argument("--times", type=location, metavar="FILE", help="file with the times of the events")
    parser.add_argument("--time-unit", choices=TIME_UNITS, default="s")
    parser.add_argument(
        "--max-history", type=positive, default=200, help="most events per history, the newest"
    )
    command.add_core(parser)
    command.add_part_rows(parser)
    ties.add_flags(parser, [])
    options = parser.parse_args(arguments)
    if options.ties != ties.FILE and options.times is None:
        raise ConfigError(
            f"--ties {options.ties} orders events with equal times; without --times there are none"
        )
    return options
