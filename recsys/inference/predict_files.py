"""Predicts all rows of files into a folder of parquet parts, with one process or several.

Each row group of the input becomes one part of the output, which is written to a temporary file and renamed.
So a part that exists is complete, and a killed prediction continues where it stopped, with any number of
processes. A process holds at most two row groups: it reads the next one while it scores one.
`prediction_folder` describes the files.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa
import torch.distributed as dist

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.converter import Origin
from recsys.data.plan.duplicates import MANY, Duplicates, count_repeated, find_duplicates
from recsys.data.sources import RowGroup, Source
from recsys.errors import DataError
from recsys.inference import prediction_folder as folder
from recsys.inference.prediction_folder import PartEntry, bad_rows_path, part_path
from recsys.inference.predictor import MODE, Predictor
from recsys.inference.progress import Progress
from recsys.inference.search import Recall
from recsys.training.distributed import gather, on_main

PATIENCE = timedelta(days=30)
"""Time that the processes wait for each other. The first one may search repeated rows for hours, and the last
one may finish much later than the others. If one fails, torchrun ends the others."""

_Given, _Made = TypeVar("_Given"), TypeVar("_Made")

log = logging.getLogger(__name__)


@dataclass
class Predicted:
    """The result of a prediction: its folder, the number of input rows, and of bad rows with null scores."""

    folder: Path
    rows: int
    left_out: int


class _Begun(NamedTuple):
    """The first process sends this to the others: the repeated rows of the input, and the parts to make."""

    duplicates: Duplicates | None
    missing: list[RowGroup]


def predict(predictor: Predictor, source: Source, output: Path) -> Predicted:
    """Scores every row group of a source into a folder of parquet parts, or continues an unfinished folder.

    Collective: the processes of the process group, if there is one, share the row groups that are missing.

    Raises:
        DataError: the input does not fit the package's config, has a bad row, or has two rows with the same
            key and request time, wherever they are.
        RecsysError: the folder holds something else, another process predicts into it, no space is left, or
            rows are missing at the end.
    """
    columns = source.check(predictor.pipeline, MODE)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    begun = on_main(lambda: _begin(predictor, source, output))
    # All processes hold the lock, so that a new prediction notices even one that outlived its launcher.
    with files.naming_full_disk(output), folder.alone_in(output, shared=True):
        if rank == 0:
            _warn_of_idle(len(begun.missing), world_size)
        progress = Progress(lambda: _rows_done(source, output), source.num_rows) if rank == 0 else None
        mine = begun.missing[rank::world_size]
        for _ in _make_parts(predictor, source, output, mine, columns, begun.duplicates):
            if progress is not None:
                progress.show()
        recalls = gather(predictor.recall())
        shared = source.row_groups[rank::world_size]
        entries = gather([folder.describe_part(source, group, output) for group in shared])
        return on_main(lambda: _finish(source, output, entries, recalls))


def _begin(predictor: Predictor, source: Source, output: Path) -> _Begun:
    """Searches repeated rows and prepares the folder; only the first process calls this."""
    duplicates = find_duplicates(source, predictor.pipeline)
    _say_repeated(source, predictor.pipeline, duplicates)
    folder.require_ours(output)
    with files.naming_full_disk(output), folder.alone_in(output):
        folder.note_job(predictor, source, output)
    # Processes must not look for missing parts themselves: others may be writing them by then.
    return _Begun(duplicates, [g for g in source.row_groups if not part_path(output, g).exists()])


def _warn_of_idle(groups: int, processes: int) -> None:
    if 0 < groups < processes:
        log.warning(
            "%d processes share %d row groups, so %d of them have nothing to do: write the input with more "
            "row groups",
            processes,
            groups,
            processes - groups,
        )


def _make_parts(
    predictor: Predictor,
    source: Source,
    output: Path,
    groups: list[RowGroup],
    columns: list[str],
    duplicates: Duplicates | None,
) -> Iterator[None]:
    """Makes the parts of row groups, and yields after each of them."""

    def converted(group: RowGroup) -> tuple[pa.Table, ColumnBlock]:
        table = source.read(group.file, group.number, columns)
        origin = Origin(group.file, group.first_row, source.files[group.file].path)
        return table, predictor.converter.block(table, origin, duplicates)

    left_out, limit = 0, predictor.pipeline.data.bad_rows.limit
    for group, (table, block) in zip(groups, _one_ahead(converted, groups), strict=True):
        if block.bad_rows:
            left_out += len(block.bad_rows)
            _require_few(left_out, limit)
            folder.write_bad_rows(block, source.files[group.file].path, bad_rows_path(output, group))
        folder.write_part(predictor.answer(table, block), part_path(output, group))
        yield


def _rows_done(source: Source, output: Path) -> int:
    """Returns the number of rows of all parts that exist, whichever process wrote them."""
    names = {path.name for path in output.iterdir()}
    return sum(group.num_rows for group in source.row_groups if part_path(output, group).name in names)


def _require_few(left_out: int, limit: int) -> None:
    if left_out > limit:
        raise DataError(
            f"{left_out} bad rows were left out, more than data.bad_rows.limit = {limit}. Correct the files, "
            "or raise the limit with --set data.bad_rows.limit=N and start the same command again."
        )


def _finish(
    source: Source, output: Path, shares: list[list[PartEntry]], recalls: list[Recall | None]
) -> Predicted:
    """Writes the manifest and `_SUCCESS`; only the first process calls this."""
    described = {entry.part: entry for share in shares for entry in share}
    entries = [described[part_path(output, group).name] for group in source.row_groups]
    left_out = sum(entry.left_out for entry in entries)
    with files.naming_full_disk(output):
        _say_recall(recalls, output)
        folder.write_manifest(output, entries)
    if left_out:
        log.warning("%d bad rows have no answer; %s says why", left_out, output / folder.BAD_ROWS)
    return Predicted(output, source.num_rows, left_out)


def _one_ahead(make: Callable[[_Given], _Made], items: Sequence[_Given]) -> Iterator[_Made]:
    """Yields `make(item)` for each item; a thread makes the next result while the caller uses this one."""
    with ThreadPoolExecutor(1) as thread:
        before: Future[_Made] | None = None
        for item in items:
            coming = thread.submit(make, item)
            if before is not None:
                yield before.result()
            before = coming
        if before is not None:
            yield before.result()


def _say_repeated(source: Source, pipeline: pb.Pipeline, duplicates: Duplicates | None) -> None:
    """Warns if the key columns do not distinguish all rows of the output."""
    keys = list(pipeline.data.key_columns)
    if duplicates is None or features.REQUEST_TIME in keys:
        return
    count = count_repeated(source, keys) - len(duplicates.rows)
    if count > 0:
        log.warning(
            "rows with the %s of an earlier row, at another request_time: %s. The predictions have a row for "
            "each, in the order of the input. To distinguish them, add columns to data.key_columns",
            " and ".join(keys),
            f"{count:,}" if count < MANY else f"{MANY:,} or more",
        )


def _say_recall(recalls: list[Recall | None], output: Path) -> None:
    """Logs and writes the recall of an index over the rows of all processes."""
    measured = [(recall, recall.recall) for recall in recalls if recall and recall.recall is not None]
    if not measured:
        return
    rows = sum(recall.rows for recall, _ in measured)
    share = sum(recall.rows * value for recall, value in measured) / rows
    total = replace(measured[0][0], rows=rows, recall=share)
    log.info(
        "index %s found %.2f %% of the exact top %d of %d rows", total.factory, 100 * share, total.k, rows
    )
    files.write_text(output / folder.INDEX, json.dumps(asdict(total), indent=1) + "\n")
