"""Implements `recsys.prepare_events`, which makes rows and a first config from a log in a data frame."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recsys.api.configs import Config, config, in_memory
from recsys.api.rows import Rows, to_table
from recsys.data.arrow import is_text
from recsys.errors import ConfigError, DataError
from recsys.prepare import csv

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedEvents:
    """The rows of each split of a log, and a config for a first model.

    Attributes:
        config: the config that `python -m recsys.prepare csv` writes as `starter.config`, with the
            vocabularies of the log; `recsys.config(data.config, ["train.num_epochs=5"])` changes it.
        train, validation, test: the rows of each split.
        latest: the whole history of each user at the end of the log, to make recommendations from. For
            ranking, the rows of the flag `--candidates FILE`, or None without it.
        items: the features of each item, for `recsys.config(..., items=data.items)` with an item encoder;
            None for ranking and without features.
    """

    config: Config
    train: pa.Table
    validation: pa.Table
    test: pa.Table
    latest: pa.Table | None
    items: pa.Table | None

    def __repr__(self) -> str:
        sizes = f"{self.train.num_rows} rows to train on, {self.validation.num_rows} and {self.test.num_rows}"
        return f"<recsys.PreparedEvents: {sizes} to validate and to test>"


def prepare_events(
    events: Rows,
    *,
    user: str,
    item: str,
    time: str,
    time_unit: str | None = None,
    labels: Mapping[str, str] | None = None,
    item_features: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> PreparedEvents:
    """Makes rows and a config from a log of events, as the command `python -m recsys.prepare csv` does.

    >>> data = recsys.prepare_events(ratings, user="userId", item="movieId", time="timestamp")
    >>> model = recsys.build(data.config)
    >>> recsys.fit(model, data.train, validation=data.validation)
    >>> model.recommend(data.latest, k=10)

    Without labels, the task is retrieval with leave-one-out splits: the last item of each user is the test
    target, and the item before it is the validation target. With labels, the task is ranking, split by time.

    Args:
        events: a table of any kind that `recsys.batches` takes, with one row per event.
        user, item, time: names of the columns with the user, the item and the time of each event.
        time_unit: "s", "ms" or "us" since 1970, or "iso" for dates as text; by default the unit of a date
            column, "iso" for a text column, and "s" for numbers.
        labels: columns that a ranker predicts, by the name of their task: 0 or 1, a condition such as
            "rating>=4", or any number if the column's name is followed by ":regression".
        item_features: names of columns with categories of the item.
        flags: more flags of the command, such as `["--min-item-events", "5"]`.

    Raises:
        ConfigError: a flag does not exist, or does not fit the others.
        DataError: a column is missing, or a value cannot be used; names the row.
    """
    table = to_table(events, "events")
    for name in dict.fromkeys((user, item, time, *item_features)):
        if name not in table.column_names:
            raise DataError(f"events: no column {name}; they have {', '.join(table.column_names)}")
    table, unit = _with_plain_time(table, time)
    arguments = ["--task", "ranking" if labels else "retrieval", "--time-unit", time_unit or unit]
    arguments += ["--user-column", user, "--item-column", item, "--time-column", time]
    for name, column in (labels or {}).items():
        arguments += ["--label", f"{name}={column}"]
    for name in item_features:
        arguments += ["--item-feature", name]
    with tempfile.TemporaryDirectory(prefix="recsys-") as place:
        source, folder = Path(place) / "events.parquet", Path(place) / "data"
        pq.write_table(table, source)
        _run([*arguments, "--input", str(source), "--output", str(folder), *flags], str(source))
        return _read(folder)


def _run(arguments: list[str], source: str) -> None:
    """Runs the command with its output in the log; errors name the file of the events `events`."""
    printed, complaint = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaint):
            csv.main(arguments)
    except SystemExit as error:
        raise ConfigError(complaint.getvalue().strip().rpartition("error: ")[2]) from error
    except (ConfigError, DataError) as error:
        raise type(error)(str(error).replace(source, "events")) from None
    # The last line names the folder, which is about to be removed.
    for line in printed.getvalue().splitlines()[:-1]:
        log.info("%s", line)


def _with_plain_time(table: pa.Table, time: str) -> tuple[pa.Table, str]:
    """Converts the column of times to numbers or texts; returns the table and the unit of the times."""
    place = table.schema.get_field_index(time)
    kind = table.schema.field(place).type
    if is_text(kind):
        return table, "iso"
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return table, "s"
    micros = table[time].cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False).cast(pa.int64())
    return table.set_column(place, time, micros), "us"


def _read(folder: Path) -> PreparedEvents:
    """Reads a data set into memory."""

    def rows(split: str) -> pa.Table | None:
        paths = [folder / split, folder / f"{split}.parquet"]
        existing = [path for path in paths if path.exists()]
        return pq.read_table(existing[0]).replace_schema_metadata() if existing else None

    splits = {split: rows(split) for split in ("train", "validation", "test")}
    present = {split: table for split, table in splits.items() if table is not None}
    cfg = in_memory(config(folder / "starter.config"))
    return PreparedEvents(cfg, **present, latest=rows("latest"), items=rows("items"))
