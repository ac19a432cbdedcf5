"""Converts and scores the rows of requests with a package, in a process that scores."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.converter import Origin
from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.inference.requests import for_requests
from recsys.serving.messages import Columns, Loaded, RowBatch, Scored
from recsys.serving.table import TableMaker

_ORIGIN = Origin(path="request")


class BatchScorer:
    """Scores batches of rows.

    Args:
        package: the package.
        store: fields that replace those of the package's store of users; None for what the package says.

    Attributes:
        loaded: facts about the package.

    Raises:
        ConfigError: the package cannot keep users.
        DataError: a vocabulary cannot be used.
    """

    def __init__(self, package: Package, store: pb.UserStore | None = None) -> None:
        self._ways: Counter[str] = Counter()
        observe = lambda way, rows: self._ways.update({way: rows})  # noqa: E731
        self._predictor = Predictor(package, for_requests(package.pipeline, store), observe)
        self._tables = TableMaker(package.pipeline)
        self._recommends = package.items is not None
        digest = files.sha256(package.folder / files.MANIFEST)
        self.loaded = Loaded(
            pipeline=package.pipeline,
            version=f"step-{package.description.step}-{digest[:12]}",
            outputs=list(package.description.outputs),
            searched=self._predictor.item if self._recommends else None,
            max_items=self._predictor.most_items if self._recommends else None,
            keeps_users=package.items is None and self._predictor.stored is not None,
        )

    def score(self, batch: RowBatch) -> Scored:
        """Converts the rows of a batch as one table, and scores them together."""
        began = time.perf_counter()
        # The time hardly depends on the number of rows.
        block = self._predictor.convert(self._tables.table(batch.columns, batch.streams), _ORIGIN)
        if batch.users is not None:
            block = replace(block, keys=pa.table({"user": pa.array(batch.users, pa.string())}))
        converted = time.perf_counter()
        columns = self._recommend(block, batch.k) if self._recommends else self._score(block)
        seconds = {"convert": converted - began, "score": time.perf_counter() - converted}
        ways = dict(self._ways)
        self._ways.clear()
        return Scored(columns, dict(block.bad_rows), seconds, ways)

    def _recommend(self, block: ColumnBlock, k: int) -> Columns:
        """Searches the best `k` items of each row."""
        best = self._predictor.best_items(block, k)
        _require_finite(best.scores)
        return {
            self._predictor.item: _split(best.ids.to_pylist(), best.lengths),
            features.SCORE: _split(best.scores.tolist(), best.lengths),
        }

    def _score(self, block: ColumnBlock) -> Columns:
        """Scores the candidates of each row."""
        flat, lengths = self._predictor.scores.of(block), block.lengths[pb.CANDIDATE]
        _require_finite(flat)
        tasks = self.loaded.outputs
        return {name: _split(flat[:, i].tolist(), lengths) for i, name in enumerate(tasks)}


def _require_finite(scores: np.ndarray) -> None:
    """Raises ValueError for numbers that JSON does not have."""
    if not np.isfinite(scores).all():
        raise ValueError("the package gives scores that are not finite")


def _split(values: list[Any], lengths: np.ndarray) -> list[list[Any]]:
    """Splits concatenated values into one list per row."""
    ends = np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
