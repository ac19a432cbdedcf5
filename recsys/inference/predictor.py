"""Predicts scores or recommendations for rows with original ids, in the order of the rows.

Each row group of the input becomes one part of the output, which is written to a temporary file and renamed.
So a part that exists is complete, and a killed prediction continues where it stopped. `_SUCCESS` is written
last, after rows have been counted. A ranker's part has the key columns, the candidates and a list of scores
per task; a retriever's part has the key columns, the best items and their scores, and a generator's part also
their codes.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys import files, typed_json
from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.arrow import first_line
from recsys.data.batch import Batch, Position
from recsys.data.collator import Collator
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.packer import Packer
from recsys.data.plan.duplicates import MANY, Duplicates, count_repeated, find_duplicates
from recsys.data.schema.contract import check_schema
from recsys.data.sources import RowGroup, Source
from recsys.data.unknown_ids import UnknownIds
from recsys.errors import RecsysError
from recsys.inference.eager import EagerPackage
from recsys.inference.package import Package
from recsys.inference.rows import runs
from recsys.inference.search import GivenScores, Recall, open_search
from recsys.inference.shared_rows import BlockScores, Limits, PackageProgram
from recsys.models.base import layout_rule
from recsys.ops import TopK
from recsys.scoring.pieces import group_size, piece_size
from recsys.scoring.scorer import Scorer

JOB, SUCCESS, INDEX, LOCK = "_job.json", "_SUCCESS", "_index.json", ".lock"

JOB_PARTS = {
    "package": "package",
    "predict": "setting of `predict`",
    "key_columns": "data.key_columns",
    "input": "input",
}
"""Entries of the file JOB, with their names in errors."""

LEFT_OUT = "left_out"
"""Entry of a part's schema metadata: the number of its bad rows, whose scores are null."""

LONGEST_ROW = {"cpu": 512, "cuda": 8192}
"""By device type, the most candidates of a row that run with its whole history in one pass.

On a CPU, time and memory grow with the square of this number; on a GPU, kernels skip pairs of tokens that do
not see each other.
"""

MODE, ORIGIN = "predict", Origin()

_Given, _Made = TypeVar("_Given"), TypeVar("_Made")

log = logging.getLogger(__name__)


@dataclass
class Predicted:
    """The result of a prediction: its folder, the number of input rows, and of bad rows with null scores."""

    folder: Path
    rows: int
    left_out: int


class BestItems(NamedTuple):
    """Items of several rows, end to end.

    Attributes:
        lengths: int64 [rows], number of items of each row, at most the `k` that was asked for.
        ids: original ids of all items.
        scores: float32, one for each item.
        codes: int64 [items, levels], their semantic ids; None if the model has none.
    """

    lengths: np.ndarray
    ids: pa.Array
    scores: np.ndarray
    codes: np.ndarray | None


class Predictor:
    """Scores row groups with a package.

    Args:
        package: a loaded package, or a model in eager mode.
        pipeline: the package's config, of which `predict`, `data.bad_rows` and `data.key_columns` may be
            changed; by default the config as exported.
    """

    def __init__(self, package: Package | EagerPackage, pipeline: pb.Pipeline | None = None):
        self.package = package
        changed = pipeline or package.pipeline
        self.settings = changed.predict
        self.pipeline = pb.Pipeline()
        self.pipeline.CopyFrom(package.pipeline)
        self.pipeline.data.bad_rows.CopyFrom(changed.data.bad_rows)
        self.pipeline.data.key_columns[:] = changed.data.key_columns
        self.pipeline.predict.CopyFrom(changed.predict)
        # Candidates of long rows are cut into pieces here, so no row is too long.
        self.pipeline.data.ClearField("max_candidates")
        rule = layout_rule(self.pipeline)
        self.converter = Converter.open(self.pipeline, replace(rule, targets=False), mode=MODE)
        self.packer = Packer(self.pipeline, rule, MODE)
        self.collator = Collator.open(self.pipeline, rule, MODE)
        self.unknown_ids = UnknownIds(self.pipeline)
        # The last schema that was checked, since callers usually pass the same schema.
        self._fits: pa.Schema | None = None
        microbatch = self.settings.candidates_per_microbatch
        program = package if isinstance(package, EagerPackage) else PackageProgram(package)
        self.scorer = Scorer(program, self.pipeline, microbatch)
        if package.items is None:
            bounds, outputs = limits(self.pipeline, self.settings, package), package.description.outputs
            self.scores = BlockScores(self.scorer, self._batch, bounds, len(outputs))
        else:
            self.item = features.searched_item(self.pipeline).name
            self.vocabulary = self.converter.mappings[_table(self.pipeline, self.item)]
            device = torch.device(package.description.device)
            declared = model_of(self.pipeline)
            self.scores_items, self.finds_items = declared.scores_items, declared.finds_items
            self.has_codes = bool(declared.code_bundle)
            # The most items that a row can get.
            self.most_items = min(len(package.items), declared.num_found or len(package.items))
            given = GivenScores() if self.scores_items or self.finds_items else None
            self.search = given or open_search(self.settings, package.items, device)

    def table(
        self, table: pa.Table, origin: Origin = ORIGIN, duplicates: Duplicates | None = None
    ) -> pa.Table:
        """Scores the rows of a table; row i of the answer belongs to row i of the table.

        Args:
            table: the columns of an input file; other columns are ignored.
            origin: position of the table in its source, for errors.
            duplicates: duplicate rows of the whole source; None searches for duplicates within the table.

        Raises:
            DataError: a column is missing or has a wrong type, or a row is bad and `data.bad_rows` does not
                leave it out.
        """
        return self.answer(table, self.convert(table, origin, duplicates))

    def convert(
        self, table: pa.Table, origin: Origin = ORIGIN, duplicates: Duplicates | None = None
    ) -> ColumnBlock:
        """Checks and converts the rows of one table; arguments and errors are those of `table`."""
        if table.schema != self._fits:
            check_schema(table.schema, self.pipeline, MODE, origin.path)
            self._fits = table.schema
        return self.converter.block(table, origin, duplicates)

    def answer(self, table: pa.Table, block: ColumnBlock) -> pa.Table:
        """Scores the rows of a table, like `table`, given the block that it was converted to."""
        columns = (self._rank if self.package.items is None else self._retrieve)(block, table)
        answer = table.select(list(self.pipeline.data.key_columns))
        for name, column in columns.items():
            answer = answer.append_column(name, column)
        return answer.replace_schema_metadata({LEFT_OUT: str(int((block.codes != 0).sum()))})

    def queries(self, table: pa.Table) -> np.ndarray:
        """Computes the query vector for each row's next item, float32 [rows, E].

        The model must search items. One that scores them all gives the scores, [rows, V], in the order of the
        vocabulary. Rows without history and bad rows that are left out get zeros.

        Args:
            table: as for `table`.

        Raises:
            DataError: as in `table`.
        """
        block = self.convert(table)
        vectors = [
            self._queries(self._batch(block.select(rows))).numpy()
            for rows in runs(len(block.row), self.settings.batch_size)
        ]
        width = self.package.items.shape[0 if self.scores_items else 1]
        return np.concatenate([np.zeros((0, width), np.float32), *vectors])

    def recall(self) -> Recall | None:
        """Returns the share of the exact results that the index has found so far; None without an index."""
        return None if self.package.items is None else self.search.recall()

    def _rank(self, block: ColumnBlock, table: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        names = self.package.description.outputs
        flat = self.scores.of(block)
        lengths = _lengths(block.lengths[pb.CANDIDATE], block)
        item = features.candidate_item(self.pipeline)
        columns = {item: table[item]} if item else {}
        return columns | {name: _lists(pa.array(flat[:, i]), lengths) for i, name in enumerate(names)}

    def best_items(self, block: ColumnBlock, k: int) -> BestItems:
        """Searches the best items of each row, of a model that searches items; the best come first."""
        items, scores = [np.zeros((0, k), np.int64)], [np.zeros((0, k), np.float32)]
        for rows in runs(len(block.row), self.settings.batch_size):
            best = self._best(self._batch(block.select(rows)), k)
            items.append(best.items.numpy())
            scores.append(best.scores.numpy())
        numbers = np.concatenate(items)
        is_item = numbers >= 0
        return BestItems(
            lengths=is_item.sum(axis=1),
            ids=self.vocabulary.ids.take(pa.array(numbers[is_item])),
            scores=np.concatenate(scores)[is_item],
            codes=self.package.items.numpy()[numbers[is_item]].astype(np.int64) if self.has_codes else None,
        )

    def _best(self, batch: Batch, k: int) -> TopK:
        """Returns the best items of a batch on the host, as indices into the vocabulary."""
        if self.finds_items:
            found = self.package.find(batch)
            scores, rows = found.scores.float().cpu()[:, :k], found.items.cpu()[:, :k]
            return TopK(scores, torch.from_numpy(self.vocabulary.layout.id_of(rows.numpy() + 1)))
        queries = self._queries(batch)
        # An unknown item has the index -1, which is ignored.
        removed = torch.from_numpy(self.vocabulary.layout.id_of(batch.seen.numpy()))
        removed_lengths = batch.seen_layout.lengths
        return self.search.best(queries, k, removed=removed, removed_lengths=removed_lengths)

    def _retrieve(self, block: ColumnBlock, table: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        best = self.best_items(block, self.settings.top_k)
        lengths = _lengths(best.lengths, block)
        columns = {
            self.item: _lists(best.ids, lengths),
            features.SCORE: _lists(pa.array(best.scores), lengths),
        }
        if best.codes is None:
            return columns
        codes = pa.FixedSizeListArray.from_arrays(pa.array(best.codes.reshape(-1)), best.codes.shape[1])
        levels = pa.list_(pa.int64())
        return columns | {features.CODES: _lists(codes.cast(levels), lengths)}

    def _queries(self, batch: Batch) -> torch.Tensor:
        answers = self.scorer.score(batch).cpu()
        if not self.scores_items:
            return answers
        # The model orders scores as rows of its table, and searches take the order of the vocabulary.
        places = np.arange(len(self.vocabulary))
        return answers[:, torch.from_numpy(self.vocabulary.layout.row_of(places) - 1)]

    def _batch(self, block: ColumnBlock) -> Batch:
        arrays = self.packer.pack(block)
        self.unknown_ids.observe(arrays)
        return self.collator.collate(arrays, Position(), 0)


def limits(pipeline: pb.Pipeline, settings: pb.Predict, package: Package | EagerPackage) -> Limits:
    """Returns the bounds of a package's batches, which depend on `predict` and the package's device."""
    device, longest = package.description.device, package.pipeline.data.max_candidates
    return Limits(
        rows=settings.batch_size,
        candidates=settings.batch_size * max(longest, LONGEST_ROW["cpu"]),
        longest=piece_size(pipeline, max(longest, LONGEST_ROW[device])),
        group_size=group_size(pipeline),
    )


def predict(predictor: Predictor, source: Source, output: Path) -> Predicted:
    """Scores every row group of a source into a folder of parquet parts, or continues an unfinished folder.

    Raises:
        DataError: the input does not fit the package's config, has a bad row, or has two rows with the same
            key and request time, wherever they are.
        RecsysError: the folder holds something else, another process predicts into it, no space is left, or
            rows are missing at the end.
    """
    columns = source.check(predictor.pipeline, MODE)
    duplicates = find_duplicates(source, predictor.pipeline)
    _say_repeated(source, predictor.pipeline, duplicates)
    _require_ours(output)
    with files.naming_full_disk(output), _alone_in(output):
        _begin(predictor, source, output)
        return _predict(predictor, source, output, columns, duplicates)


def _predict(
    predictor: Predictor, source: Source, output: Path, columns: list[str], duplicates: Duplicates | None
) -> Predicted:
    """Writes the missing parts, then `_SUCCESS` if the parts have all rows."""
    parts = {
        group: output / f"part-{group.file:05d}-{group.number:05d}.parquet" for group in source.row_groups
    }

    def converted(group: RowGroup) -> tuple[pa.Table, ColumnBlock]:
        table = source.read(group.file, group.number, columns)
        origin = Origin(group.file, group.first_row, source.files[group.file].path)
        return table, predictor.converter.block(table, origin, duplicates)

    missing_groups = [group for group, part in parts.items() if not part.exists()]
    for group, (table, block) in zip(missing_groups, _one_ahead(converted, missing_groups), strict=True):
        _write(predictor.answer(table, block), parts[group])
    rows = left_out = 0
    for group, part in parts.items():
        written = _read_footer(part)
        if written.rows != group.num_rows:
            raise RecsysError(f"{part}: it has {written.rows} rows, its input {group.num_rows}; remove it")
        left_out += written.left_out
        rows += group.num_rows
    _say_recall(predictor.recall(), output)
    files.write_text(output / SUCCESS, json.dumps({"rows": rows, "left_out": left_out}) + "\n")
    return Predicted(output, rows, left_out)


class _Footer(NamedTuple):
    """The number of rows of a part, and of those that were left out as bad."""

    rows: int
    left_out: int


def _read_footer(part: Path) -> _Footer:
    try:
        with pq.ParquetFile(part) as written:
            noted = (written.schema_arrow.metadata or {})[LEFT_OUT.encode()]
            return _Footer(written.metadata.num_rows, int(noted))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        problem = f"not a file of predictions ({first_line(error)})"
        raise RecsysError(f"{part}: {problem}; remove it and start the same command again") from error


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


def _say_recall(recall: Recall | None, output: Path) -> None:
    if recall is None or recall.recall is None:
        return
    log.info(
        "index %s found %.2f %% of the exact top %d of %d rows",
        recall.factory,
        100 * recall.recall,
        recall.k,
        recall.rows,
    )
    files.write_text(output / INDEX, json.dumps(asdict(recall), indent=1) + "\n")


def _require_ours(output: Path) -> None:
    """Raises RecsysError if the folder holds anything but predictions."""
    if output.exists() and not output.is_dir():
        raise RecsysError(f"{output} is a file, and predictions are a folder: give another --output")
    names = {path.name for path in output.iterdir()} if output.exists() else set()
    begun = JOB in names and any(name.startswith("part-") for name in names)
    # A job without a finished part leaves nothing that could be confused with another job.
    if not begun and any(not name.startswith(".part-") for name in names - {JOB, LOCK}):
        raise RecsysError(f"{output} is not empty and holds no predictions: give another --output")


@contextmanager
def _alone_in(output: Path) -> Iterator[None]:
    output.mkdir(parents=True, exist_ok=True)
    with files.locked(output / LOCK) as taken:
        if not taken:
            raise RecsysError(
                f"{output}: another process predicts into this folder; wait for it, end it, or give another "
                "--output"
            )
        yield


def _begin(predictor: Predictor, source: Source, output: Path) -> None:
    """Records package, settings and input in the folder; raises RecsysError on parts of another job."""
    job = {
        "package": files.sha256(predictor.package.folder / files.MANIFEST),
        "predict": str(predictor.settings).split("\n"),
        "key_columns": list(predictor.pipeline.data.key_columns),
        "input": [asdict(mark) for mark in source.marks()],
    }
    noted = output / JOB
    if not any(output.glob("part-*.parquet")):
        files.write_text(noted, json.dumps(job, indent=1) + "\n")
        return
    try:
        before = typed_json.parse(noted.read_bytes(), dict[str, Any])
    except (OSError, ValueError, TypeError) as error:
        raise RecsysError(
            f"{noted}: cannot be read ({error}), so it is unknown which input the predictions belong to: "
            "give another --output, or remove that folder"
        ) from error
    changed = [label for name, label in JOB_PARTS.items() if before.get(name) != job[name]]
    if changed:
        raise RecsysError(
            f"{output} holds predictions made with a different {' and a different '.join(changed)}: give "
            "another --output, or remove that folder"
        )


def _write(table: pa.Table, part: Path) -> None:
    aside = part.with_name(f".{part.name}.partial")
    pq.write_table(table, aside, compression="zstd", write_page_checksum=True)
    files.publish(aside, part)


def _table(pipeline: pb.Pipeline, item: str) -> str:
    return next(feature.id.table for feature in pipeline.features if feature.name == item)


def _lengths(lengths: np.ndarray, block: ColumnBlock) -> pa.Array:
    """Returns the list lengths of a column of the answer; null for a bad row that was left out."""
    return pa.array(lengths, mask=block.codes != 0)


def _lists(values: pa.Array, lengths: pa.Array) -> pa.Array:
    """Splits consecutive values into one list per row; null where the length is null."""
    ends = np.cumsum(lengths.fill_null(0).to_numpy())
    starts = pa.array(np.concatenate([[0], ends]), mask=np.append(lengths.is_null(), False))
    return pa.LargeListArray.from_arrays(starts, values).cast(pa.list_(values.type))
