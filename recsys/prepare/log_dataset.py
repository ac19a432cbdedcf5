"""Makes a data set from a log of interactions: rows of each split, vocabularies, items and starter config.

The tools `csv` and `sequences` read different files and share everything that follows.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from recsys.errors import DataError
from recsys.prepare import command
from recsys.prepare.candidates import write_latest
from recsys.prepare.dataset_writer import (
    LATEST,
    TEST,
    TRAIN,
    VALIDATION,
    Contents,
    DatasetWriter,
    plain_table,
)
from recsys.prepare.events import Log, cut_log
from recsys.prepare.items import items_of, join_items, write_items
from recsys.prepare.log_columns import SECOND, LogColumns, Piece
from recsys.prepare.rows import freeze_histories, holdout_slices, request_slices
from recsys.prepare.starter_config import write_config
from recsys.prepare.text_tables import fingerprints
from recsys.prepare.ties import FILE, TieCounter, report


@dataclass(frozen=True)
class LogSettings:
    """Settings that decide how rows are cut from a log; the fields have the names of the flags.

    Attributes:
        task: "ranking" or "retrieval".
        session_gap: longest pause within a request, in seconds (ranking).
        max_candidates: most candidates of a request (ranking).
        max_history: number of newest events that a history keeps.
        validation_share, test_share: shares of all events, the latest ones (ranking).
        evaluation_history: "frozen" or "live" (ranking).
        min_count: number of training events that make an id known (ranking).
        part_rows: number of events in memory at a time.
        min_user_events, min_item_events: users and items with fewer events are left out (retrieval).
        ties, seed: order of a user's events with the same time; see the module `ties`.
    """

    task: str
    session_gap: int = 60
    max_candidates: int = 10
    max_history: int = 200
    validation_share: float = 0.1
    test_share: float = 0.1
    evaluation_history: str = "frozen"
    min_count: int = 1
    part_rows: int = 2_000_000
    min_user_events: int = 1
    min_item_events: int = 1
    ties: str = FILE
    seed: int = 0


class LogInput(NamedTuple):
    """The log that events are read from.

    Attributes:
        path: name of the whole log in errors.
        files: the files that schema.json describes.
        columns: meaning of the log's columns.
        pieces: the events as text.
        candidates: candidates to score now, as `read_candidates` returns them (ranking); None: none.
    """

    path: Path
    files: list[Path]
    columns: LogColumns
    pieces: Iterator[Piece]
    candidates: pl.DataFrame | None = None


def make_dataset(
    log_input: LogInput,
    contents: Contents,
    settings: LogSettings,
    about: Mapping[str, object],
    options: argparse.Namespace,
) -> Log:
    """Writes the folder of a data set, prints the size of each split and returns the log.

    Args:
        log_input: the events.
        contents: which columns the data set has.
        settings: how rows are cut.
        about: entries of the tool in schema.json about source and license.
        options: the parsed flags that every tool has.
    """
    with command.output_folder(options.output, source=options.input, overwrite=options.overwrite) as folder:
        with tempfile.TemporaryDirectory(prefix=".parts-", dir=folder) as parts:
            log = cut_log(log_input.pieces, log_input.columns, Path(parts), part_rows=settings.part_rows)
            if not log.num_rows:
                raise DataError(f"{log_input.path}: no events")
            if max(settings.min_user_events, settings.min_item_events) > 1:
                log.keep_core(settings.min_user_events, settings.min_item_events)
            writer = DatasetWriter(folder, contents, rows_per_group=options.rows_per_group)
            tied = TieCounter()
            items = _write_parts(writer, log, settings, tied)
            notes = []
            if log_input.candidates is not None:
                notes = write_latest(
                    writer, log, log_input.candidates, log_input.columns, settings.max_history
                )
        for split in (TRAIN, VALIDATION, TEST):
            if split not in writer.splits:
                raise DataError(
                    f"{log_input.path}: no rows for the {split} split; {_remedy(settings.task, split)}"
                )
        if items is not None and items.width > 1:
            write_items(folder, items)
        sizes = writer.write_vocabularies(
            min_count=settings.min_count, catalogue=None if items is None else {"item_id": items["item_id"]}
        )
        described = {
            **about,
            "inputs": fingerprints(log_input.files),
            "settings": dict(vars(settings)),
            "input_columns": _input_columns(log_input.columns),
            "input_rows": log.num_rows,
            "ties": tied.describe(settings.ties, settings.seed),
        }
        schema = writer.write_schema(described, sizes)
        write_config(schema, folder, options.output)
    for name, split in schema["splits"].items():
        print(f"{name}: {split['rows']} rows, {split['candidates']} candidates")
    for note in notes:
        print(note)
    print(report(schema["ties"]))
    return log


def _write_parts(
    writer: DatasetWriter, log: Log, settings: LogSettings, tied: TieCounter
) -> pl.DataFrame | None:
    """Writes the rows of all parts and counts ties; returns the items, with features, of a retrieval log."""
    bounds = log.time_quantiles(1 - settings.validation_share - settings.test_share, 1 - settings.test_share)
    item_features = [feature.name for feature in writer.contents.features[1:]]
    items = []
    for number in range(len(log.parts)):
        events = log.part(number)
        if not events.height:
            continue
        tied.add(events["user_id"].rle_id().to_numpy(), events["time_us"].to_numpy())
        if settings.task == "ranking":
            _write_ranking(writer, events, number, bounds, settings)
        else:
            _write_retrieval(writer, events, number, log.last_time // SECOND, settings.max_history)
            items.append(items_of(events, item_features))
    return join_items(items) if items else None


def _write_ranking(
    writer: DatasetWriter, events: pl.DataFrame, number: int, bounds: list[int], settings: LogSettings
) -> None:
    """Writes the ranking rows of one part, ordered by time within the part."""
    time = events["time_us"].to_numpy()
    split = np.searchsorted(np.array(bounds), time, side="right")
    user = events["user_id"].rle_id().to_numpy()
    slices = request_slices(
        user,
        time,
        gap=settings.session_gap * SECOND,
        max_candidates=settings.max_candidates,
        max_history=settings.max_history,
        apart=(split,),
    )
    if settings.evaluation_history == "frozen":
        slices = freeze_histories(slices, user, split, split > 0, max_history=settings.max_history)
    user_features = [feature.name for feature in writer.contents.features if feature.sides == ("USER",)]
    first = slices.candidate_start
    keys = ("user_id", pl.col("order").alias("request_id"), pl.col("timestamps").alias("request_time"))
    rows = events[pl.Series(first)].select(*keys, *user_features)
    names = np.array((TRAIN, VALIDATION, TEST))[split[first]]
    writer.write_splits(names, time[first], plain_table(events), slices, rows, part=number)


def _write_retrieval(
    writer: DatasetWriter, events: pl.DataFrame, number: int, now: int, max_history: int
) -> None:
    """Writes the leave-one-out rows of one part, ordered by user, and histories as of `now` (seconds)."""
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
            user, held_out=held_out, with_candidate=with_candidate, max_history=max_history
        )
        # A training row needs two events, because the first one predicts the second.
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


def _remedy(task: str, split: str) -> str:
    if task == "ranking":
        return "events must differ in time; change --validation-share or --test-share"
    # The last two events of a user are held out, and a training row needs an event and the next one.
    fewest = {TRAIN: 4, VALIDATION: 3, TEST: 2}
    return f"some user needs at least {fewest[split]} events"


def _input_columns(columns: LogColumns) -> dict[str, object]:
    """Maps columns of the data set to the columns of the log that they were made from."""
    return {
        "user_id": columns.user,
        "item_id": columns.item,
        "timestamps": columns.time,
        **({"watch_time": columns.watch_time} if columns.watch_time else {}),
        **{f"candidate_{name}": str(signal) for name, signal in columns.labels.items()},
        **{f"action {name}": str(signal) for name, signal in columns.actions.items()},
        **({"fills": dict(columns.fills)} if columns.fills else {}),
    }
