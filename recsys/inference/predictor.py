"""Predicts scores or recommendations for rows with original ids, in the order of the rows.

A ranker's answer has the key columns, the candidates and a list of scores per task; a retriever's answer has
the key columns, the best items and their scores, and a generator's answer also their codes. `predict_files`
answers all rows of files.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch, Position
from recsys.data.collator import Collator
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.packer import Packer
from recsys.data.plan.duplicates import Duplicates
from recsys.data.schema.contract import check_schema
from recsys.data.unknown_ids import UnknownIds
from recsys.inference.eager import EagerPackage
from recsys.inference.package import Package
from recsys.inference.rows import runs
from recsys.inference.search import GivenScores, Recall, open_search
from recsys.inference.shared_rows import BlockScores, Limits, PackageProgram
from recsys.inference.stored_scores import open_store
from recsys.models.base import layout_rule
from recsys.ops import TopK
from recsys.scoring.pieces import group_size, piece_size
from recsys.scoring.scorer import Scorer

LEFT_OUT = "left_out"
"""Entry of a part's schema metadata: the number of its bad rows, whose scores are null."""

LONGEST_ROW = {"cpu": 512, "cuda": 8192}
"""By device type, the most candidates of a row that run with its whole history in one pass.

On a CPU, time and memory grow with the square of this number; on a GPU, kernels skip pairs of tokens that do
not see each other.
"""

MOST_SCHEMAS = 8
"""Number of schemas of tables that a predictor remembers as checked."""

MODE, ORIGIN = "predict", Origin()


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
        observe_store: called with the way and the number of rows that `predict.user_store` scored in it.

    Attributes:
        stored: scores with the store of users; None if the config has none.
    """

    def __init__(
        self,
        package: Package | EagerPackage,
        pipeline: pb.Pipeline | None = None,
        observe_store: Callable[[str, int], None] = lambda way, rows: None,
    ):
        self.package = package
        changed = pipeline or package.pipeline
        self.settings = changed.predict
        self.pipeline = pb.Pipeline()
        self.pipeline.CopyFrom(package.pipeline)
        self.pipeline.data.bad_rows.CopyFrom(changed.data.bad_rows)
        self.pipeline.data.key_columns[:] = changed.data.key_columns
        self.pipeline.predict.CopyFrom(changed.predict)
        # Only metrics read groups.
        self.pipeline.data.ClearField("group_column")
        # Candidates of long rows are cut into pieces here, so no row is too long.
        self.pipeline.data.ClearField("max_candidates")
        rule = layout_rule(self.pipeline)
        self.converter = Converter.open(self.pipeline, replace(rule, targets=False), mode=MODE)
        self.packer = Packer(self.pipeline, rule, MODE)
        self.collator = Collator.open(self.pipeline, rule, MODE)
        self.unknown_ids = UnknownIds(self.pipeline)
        # The last schemas that were checked, since callers usually pass the same ones. Threads share them, so
        # they are replaced and not changed.
        self._fit: tuple[pa.Schema, ...] = ()
        microbatch = self.settings.candidates_per_microbatch
        program = package if isinstance(package, EagerPackage) else PackageProgram(package)
        self.scorer = Scorer(program, self.pipeline, microbatch)
        self.stored = open_store(self.scorer, self._batch, self.pipeline, observe_store)
        if package.items is None:
            bounds, outputs = limits(self.pipeline, self.settings, package), package.description.outputs
            score = None if self.stored is None else self.stored.score
            self.scores = BlockScores(self.scorer, self._batch, bounds, len(outputs), score)
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
        if table.schema not in self._fit:
            check_schema(table.schema, self.pipeline, MODE, origin.path)
            self._fit = (*self._fit[1 - MOST_SCHEMAS :], table.schema)
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
        starts = _starts(_lengths(block.lengths[pb.CANDIDATE], block))
        item = features.candidate_item(self.pipeline)
        columns = {item: table[item]} if item else {}
        return columns | {name: _lists(pa.array(flat[:, i]), starts) for i, name in enumerate(names)}

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
            best = self.package.find(batch)
            scores, rows = best.scores.float().cpu()[:, :k], best.items.cpu()[:, :k]
            # `decoding.items` may list fewer items than k.
            missing = (0, k - rows.shape[1])
            scores, rows = F.pad(scores, missing, value=-torch.inf), F.pad(rows, missing, value=-1)
            return TopK(scores, torch.from_numpy(self.vocabulary.layout.id_of(rows.numpy() + 1)))
        queries = self._queries(batch)
        # An unknown item has the index -1, which is ignored.
        removed = torch.from_numpy(self.vocabulary.layout.id_of(batch.seen.numpy()))
        removed_lengths = batch.seen_layout.lengths
        return self.search.best(queries, k, removed=removed, removed_lengths=removed_lengths)

    def _retrieve(self, block: ColumnBlock, table: pa.Table) -> dict[str, pa.Array | pa.ChunkedArray]:
        best = self.best_items(block, self.settings.top_k)
        starts = _starts(_lengths(best.lengths, block))
        columns = {
            self.item: _lists(best.ids, starts),
            features.SCORE: _lists(pa.array(best.scores), starts),
        }
        if best.codes is None:
            return columns
        codes = pa.FixedSizeListArray.from_arrays(pa.array(best.codes.reshape(-1)), best.codes.shape[1])
        levels = pa.list_(pa.int64())
        return columns | {features.CODES: _lists(codes.cast(levels), starts)}

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


def _table(pipeline: pb.Pipeline, item: str) -> str:
    return next(feature.id.table for feature in pipeline.features if feature.name == item)


def _lengths(lengths: np.ndarray, block: ColumnBlock) -> pa.Array:
    """Returns the list lengths of a column of the answer; null for a bad row that was left out."""
    return pa.array(lengths, mask=block.codes != 0)


def _starts(lengths: pa.Array) -> pa.Array:
    """Returns the offsets of lists of these lengths; null where the length is null."""
    ends = np.cumsum(lengths.fill_null(0).to_numpy())
    return pa.array(np.concatenate([[0], ends]), mask=np.append(lengths.is_null(), False))


def _lists(values: pa.Array, starts: pa.Array) -> pa.Array:
    """Splits consecutive values into one list per row, given their offsets."""
    return pa.LargeListArray.from_arrays(starts, values).cast(pa.list_(values.type))
