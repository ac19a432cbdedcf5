"""A loaded package that answers requests: validation, and the batcher that converts and scores their rows."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.data.convert.column_block import ColumnBlock
from recsys.data.convert.converter import Origin
from recsys.errors import DataError
from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.serving.batcher import Batcher, BatchLimits
from recsys.serving.schema import (
    Failure,
    Finding,
    InvalidRequestError,
    RequestLimits,
    RequestSchema,
    output_types,
)

_ORIGIN = Origin(path="request")
_REMEDY = " Correct the file"
"""Beginning of the advice that errors about files end with."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A validated request.

    Attributes:
        request: the pydantic model.
        k: number of items to recommend for each row; 0 for a model that scores candidates.
    """

    request: Any
    k: int


Columns = dict[str, list[list[Any]]]
"""Columns of an answer, each with a list per row."""


class ServingModel:
    """A package that answers requests. Loading checks hashes and golden rows, as every `Package` does.

    Args:
        folder: folder of the package.
        requests: bounds of a request.
        batches: bounds of batches and of the queue.
        observe: called with the number of rows of each batch.

    Attributes:
        version: step of the model, and the beginning of the hash of the package's manifest.
        recommends: True if the model searches items, False if it scores candidates.

    Raises:
        PackageError: the package is damaged, or gives different answers on this machine.
        DataError: a vocabulary cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        requests: RequestLimits,
        batches: BatchLimits,
        observe: Callable[[int], None] = lambda rows: None,
    ) -> None:
        package = Package(folder)
        self.folder = folder
        self.version = f"step-{package.description.step}-{files.sha256(folder / files.MANIFEST)[:12]}"
        self.recommends = package.items is not None
        keys = list(package.pipeline.data.key_columns)
        self._predictor = Predictor(package, _for_requests(package.pipeline))
        searched = self._predictor.item if package.items is not None else None
        outputs = output_types(package.pipeline, package.description.outputs, searched)
        self._tasks = package.description.outputs
        self._candidates = None if self.recommends else features.candidate_item(package.pipeline)
        max_items = self._predictor.most_items if self.recommends else None
        self.schema = RequestSchema(package.pipeline, keys, outputs, max_items, requests)
        self.batcher: Batcher[Prepared, Columns] = Batcher(self._run, batches, observe)

    def prepare(self, body: bytes) -> Prepared:
        """Validates the body of a request. Its rows are converted with those of its batch.

        Raises:
            InvalidRequestError: the body is not JSON, or does not fit the schema; names field and row.
        """
        request = self.schema.parse(body)
        return Prepared(request, request.k if self.recommends else 0)

    def answer(self, prepared: Prepared, columns: Columns) -> dict[str, Any]:
        """Returns the body of the response: the columns of the answer beside the request's keys."""
        rows = []
        for i, given in enumerate(prepared.request.rows):
            row = {name: self.schema.values(given, name) for name in self.schema.keys}
            if self._candidates is not None:
                row[self._candidates] = self.schema.values(given, self._candidates)
            row |= {name: values[i] for name, values in columns.items()}
            rows.append(row)
        return {"model": self.version, "rows": rows}

    def _run(self, batch: Sequence[Prepared]) -> list[Columns]:
        """Converts and scores the rows of all requests together.

        Raises:
            InvalidRequestError: a row is bad. The batcher then calls this for each request alone, so an error
                names the rows of the request that gets it.
        """
        block = self._convert([row for prepared in batch for row in prepared.request.rows])
        rows = np.cumsum([len(prepared.request.rows) for prepared in batch])[:-1]
        if self.recommends:
            k = max(prepared.k for prepared in batch)
            best = self._predictor.best_items(block, k)
            ids, scores = (
                _split(best.ids.to_pylist(), best.lengths),
                _split(best.scores.tolist(), best.lengths),
            )
            starts = [0, *rows.tolist(), len(ids)]
            return [
                {
                    self._predictor.item: [row[: request.k] for row in ids[start:end]],
                    features.SCORE: [row[: request.k] for row in scores[start:end]],
                }
                for request, start, end in zip(batch, starts[:-1], starts[1:], strict=True)
            ]
        lengths = block.lengths[pb.CANDIDATE]
        flat = self._predictor.scores.of(block)
        columns = {name: _split(flat[:, i].tolist(), lengths) for i, name in enumerate(self._tasks)}
        starts = [0, *rows.tolist(), len(lengths)]
        return [
            {name: values[start:end] for name, values in columns.items()}
            for start, end in zip(starts[:-1], starts[1:], strict=True)
        ]

    def _convert(self, rows: list[Any]) -> ColumnBlock:
        """Converts validated rows. The time hardly depends on their number, so a batch becomes one table."""
        try:
            return self._predictor.convert(self.schema.table(rows), _ORIGIN)
        except DataError as error:
            message = str(error).partition(_REMEDY)[0]
            failure = Failure(error="a row is bad", findings=[Finding(field="rows", message=message)])
            raise InvalidRequestError(422, failure) from None


def _for_requests(pipeline: pb.Pipeline) -> pb.Pipeline:
    """Changes a package's config for requests: keys need not be unique, and bad rows are errors."""
    data = pipeline.data
    data.ClearField("key_columns")
    data.ClearField("group_column")
    data.ClearField("bad_rows")
    return pipeline


def _split(values: list[Any], lengths: np.ndarray) -> list[list[Any]]:
    """Splits concatenated values into one list per row."""
    ends = np.cumsum(lengths).tolist()
    return [values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
