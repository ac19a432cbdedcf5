"""A loaded package that answers requests: validation, and the batcher that converts and scores their rows."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from recsys.serving.batcher import Batcher, BatchLimits
from recsys.serving.schema import (
    MOST_FINDINGS,
    Failure,
    Finding,
    InvalidRequestError,
    RequestLimits,
    RequestSchema,
    output_types,
)

_ORIGIN = Origin(path="request")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A validated request.

    Attributes:
        rows: pydantic models.
        k: number of items to recommend for each row; 0 for a model that scores candidates.
        places: the places of the rows in the request that they come from.
    """

    rows: list[Any]
    k: int
    places: Sequence[int]


class StoreOptions(NamedTuple):
    """Settings of a store of users.

    Attributes:
        settings: fields that replace those of the package; None for what the package says.
        observe: called with the way and the number of rows that were scored in it.
    """

    settings: pb.UserStore | None = None
    observe: Callable[[str, int], None] = lambda way, rows: None


Columns = dict[str, list[list[Any]]]
"""Columns of an answer, each with a list per row."""


class ServingModel:
    """A package that answers requests.

    Args:
        package: the package.
        requests: bounds of a request.
        batches: bounds of batches and of the queue.
        observe: called with the number of rows of each batch.
        store: a store of users, and who observes it.

    Attributes:
        folder: folder of the package.
        pipeline: the package's config.
        version: step, and the beginning of the hash of the package's manifest.
        recommends: True if it searches items, False if it scores candidates.

    Raises:
        ConfigError: the package cannot keep users.
        DataError: a vocabulary cannot be used.
    """

    def __init__(
        self,
        package: Package,
        requests: RequestLimits,
        batches: BatchLimits,
        observe: Callable[[int], None] = lambda rows: None,
        store: StoreOptions | None = None,
    ) -> None:
        store = store or StoreOptions()
        self.folder, self.pipeline = package.folder, package.pipeline
        self.version = f"step-{package.description.step}-{files.sha256(self.folder / files.MANIFEST)[:12]}"
        self.recommends = package.items is not None
        keys = list(package.pipeline.data.key_columns)
        pipeline = for_requests(package.pipeline, store.settings)
        self._predictor = Predictor(package, pipeline, store.observe)
        searched = self._predictor.item if package.items is not None else None
        outputs = output_types(package.pipeline, package.description.outputs, searched)
        self._tasks = package.description.outputs
        self._candidates = None if self.recommends else features.candidate_item(package.pipeline)
        max_items = self._predictor.most_items if self.recommends else None
        self.schema = RequestSchema(package.pipeline, keys, outputs, max_items, requests)
        self.batcher: Batcher[Prepared, Columns] = Batcher(self._run, batches, observe)

    def prepare(self, body: bytes | dict[str, Any]) -> Prepared:
        """Validates a request, as JSON or as an object. Its rows are converted with those of its batch.

        Raises:
            InvalidRequestError: the body is not JSON, or does not fit the schema; names field and row.
        """
        request = self.schema.parse(body)
        places = range(len(request.rows))
        return Prepared(request.rows, request.k if self.recommends else 0, places)

    def answer_rows(self, prepared: Prepared, columns: Columns) -> list[dict[str, Any]]:
        """Returns the rows of the response: the columns of an answer beside the request's keys."""
        rows = []
        for i, given in enumerate(prepared.rows):
            row = {name: self.schema.values(given, name) for name in self.schema.keys}
            if self._candidates is not None:
                row[self._candidates] = self.schema.values(given, self._candidates)
            row |= {name: values[i] for name, values in columns.items()}
            rows.append(row)
        return rows

    def _run(self, batch: Sequence[Prepared]) -> list[Columns | Exception]:
        """Converts and scores the rows of all requests together. A request with a bad row gets an error."""
        rows = [row for prepared in batch for row in prepared.rows]
        # The time hardly depends on the number of rows, so a batch is one table.
        block = self._predictor.convert(self.schema.table(rows), _ORIGIN)
        ends = np.cumsum([len(prepared.rows) for prepared in batch]).tolist()
        if self.recommends:
            columns = self._recommend(block, max(prepared.k for prepared in batch))
        else:
            if self._predictor.stored is not None:
                # A store of users knows them by the first key column, as text.
                users = [None if (user := self.schema.user(row)) is None else str(user) for row in rows]
                block = replace(block, keys=pa.table({"user": pa.array(users, pa.string())}))
            columns = self._score(block)
        answers: list[Columns | Exception] = []
        for prepared, end in zip(batch, ends, strict=True):
            start = end - len(prepared.rows)
            bad = {
                place: block.bad_rows[row]
                for place, row in zip(prepared.places, range(start, end), strict=True)
                if row in block.bad_rows
            }
            if bad:
                answers.append(_refused(bad))
                continue
            mine = {name: values[start:end] for name, values in columns.items()}
            if self.recommends:
                mine = {name: [row[: prepared.k] for row in values] for name, values in mine.items()}
            answers.append(mine)
        return answers

    def _recommend(self, block: ColumnBlock, k: int) -> Columns:
        """Searches the best `k` items of each row."""
        best = self._predictor.best_items(block, k)
        return {
            self._predictor.item: _split(best.ids.to_pylist(), best.lengths),
            features.SCORE: _split(best.scores.tolist(), best.lengths),
        }

    def _score(self, block: ColumnBlock) -> Columns:
        """Scores the candidates of each row."""
        flat, lengths = self._predictor.scores.of(block), block.lengths[pb.CANDIDATE]
        return {name: _split(flat[:, i].tolist(), lengths) for i, name in enumerate(self._tasks)}


def _refused(bad: dict[int, str]) -> InvalidRequestError:
    """Returns the error about a request's bad rows, given a sentence for each by its index."""
    findings = [Finding(field=f"rows[{row}]", message=sentence) for row, sentence in bad.items()]
    more = len(findings) - MOST_FINDINGS
    said = f"rows are bad{f'; {more} more findings' if more > 0 else ''}"
    return InvalidRequestError(422, Failure(error=said, findings=findings[:MOST_FINDINGS]))


def _split(values: list[Any], lengths: np.ndarray) -> list[list[Any]]:
    """Splits concatenated values into one list per row."""
    ends = np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
