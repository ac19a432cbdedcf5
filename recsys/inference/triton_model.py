"""Answers requests inside of Triton Inference Server: the class behind `model.py` of a model repository.

Triton's Python backend makes an instance in a process of its own and calls `initialize`, `execute` for each
batch of requests, and `finalize`. Its module `triton_python_backend_utils` exists only in such a process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import triton_python_backend_utils as pb_utils

from recsys import environment
from recsys import protos as pb
from recsys.config import features
from recsys.data.schema.contract import FileColumn, file_columns
from recsys.errors import DataError
from recsys.inference.package import Package
from recsys.inference.predictor import Predictor
from recsys.inference.requests import for_requests
from recsys.inference.triton_repository import COUNTS, NO_SCORE, is_text

_Tensors = dict[str, np.ndarray]
"""The inputs or outputs of a request by name, each [rows, values]."""


class RecsysModel:
    """Scores candidates or recommends items with a package.

    A subclass in `model.py` sets `package`, the folder of the package.
    """

    package: Path

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the package, on the GPU of this instance if it was compiled for GPUs.

        Args:
            args: the strings that Triton gives, of which the instance's device is read.

        Raises:
            PackageError: the package is damaged or computes something else here.
        """
        if args.get("model_instance_kind") == "GPU":
            torch.cuda.set_device(int(args["model_instance_device_id"]))
        environment.import_torchrec_quietly()
        package = Package(self.package)
        self._columns = file_columns(package.pipeline, "predict")
        self._tasks = package.description.outputs
        self._searches = package.items is not None
        self._predictor = Predictor(package, for_requests(package.pipeline))
        self._text_ids = self._searches and self._predictor.vocabulary.is_text

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answers a batch of requests, each by a response or an error of its own."""
        errors: dict[int, str] = {}
        tables: dict[int, pa.Table] = {}
        for number, request in enumerate(requests):
            try:
                tables[number] = self._table(request)
            except (DataError, ValueError, pa.ArrowException) as error:
                errors[number] = str(error)
        answers = self._answers(tables, errors) if tables else {}
        return [
            pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(errors[number]))
            if number in errors
            else pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in answers[number].items()])
            for number in range(len(requests))
        ]

    def finalize(self) -> None:
        """Releases the package."""
        del self._predictor

    def _table(self, request: Any) -> pa.Table:
        """Makes a table of a request's tensors.

        Raises:
            ValueError: tensors do not fit each other.
        """
        given = {}
        for column in self._columns:
            for name in (column.name, column.name + COUNTS)[: 1 + column.multi_valued]:
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    given[name] = tensor.as_numpy()
        times, lists = given[features.REQUEST_TIME], _lengths(self._columns, given)
        for column in self._columns:
            if not column.required and column.name not in given:
                given[column.name] = np.repeat(times, lists[column.side], axis=1)
        return pa.table({column.name: _array(column, given) for column in self._columns})

    def _answers(self, tables: dict[int, pa.Table], errors: dict[int, str]) -> dict[int, _Tensors]:
        """Scores the rows of all requests together; adds an error for each request with a bad row."""
        block = self._predictor.convert(pa.concat_tables(tables.values()))
        flat = None if self._searches else self._predictor.scores.of(block)
        best = self._predictor.best_items(block, self._predictor.settings.top_k) if self._searches else None
        lengths = block.lengths[pb.CANDIDATE] if best is None else best.lengths
        ends = np.cumsum(lengths)
        answers, first = {}, 0
        for number, table in tables.items():
            rows = range(first, first + table.num_rows)
            first += table.num_rows
            bad = next((row for row in rows if row in block.bad_rows), None)
            if bad is not None:
                errors[number] = f"row {bad - rows.start}: {block.bad_rows[bad]}"
                continue
            start, stop = ends[rows.start] - lengths[rows.start], ends[rows.stop - 1]
            if best is not None:
                ids = best.ids.slice(start, stop - start).to_pylist()
                if self._text_ids:
                    ids = [item.encode() for item in ids]
                parts = {
                    self._predictor.item: np.array(ids, object if self._text_ids else np.int64),
                    features.SCORE: best.scores[start:stop],
                }
            else:
                parts = {name: flat[start:stop, i] for i, name in enumerate(self._tasks)}
            counts = lengths[rows.start : rows.stop]
            answers[number] = {name: _padded(values, counts) for name, values in parts.items()}
        return answers


def _lengths(columns: Sequence[FileColumn], given: _Tensors) -> dict[int, int]:
    """Returns the number of events and candidates of the rows of a request, by side.

    Raises:
        ValueError: tensors of a side have different lengths, or counts do not fit their values.
    """
    rows = len(given[features.REQUEST_TIME])
    lengths: dict[int, int] = {pb.USER: 1}
    for column in columns:
        values = given.get(column.name)
        if values is None:
            continue
        if column.multi_valued:
            counts = given[column.name + COUNTS]
            if (counts < 0).any() or (counts.sum(axis=1) != values.shape[1]).any():
                raise ValueError(
                    f"{column.name}{COUNTS}: the counts of each row must add up to the {values.shape[1]} "
                    f"values of {column.name}"
                )
            values = counts
        if len(values) != rows:
            raise ValueError(f"{column.name}: {len(values)} rows, but {features.REQUEST_TIME} has {rows}")
        length = lengths.setdefault(column.side, values.shape[1])
        if values.shape[1] != length:
            raise ValueError(f"{column.name}: {values.shape[1]} values a row where {length} are expected")
    return lengths


def _array(column: FileColumn, given: _Tensors) -> pa.Array:
    """Makes a column of a table: a value per row, or lists around the values."""
    values = given[column.name]
    rows, length = values.shape
    flat = values.reshape(-1)
    if is_text(column):
        flat = [value.decode() if isinstance(value, bytes) else str(value) for value in flat.tolist()]
    array = pa.array(flat, pa.large_string() if is_text(column) else None)
    if values.dtype == np.float64:
        array = pa.array(flat, from_pandas=True)  # NaN stands for a missing number
    if column.multi_valued:
        counts = given[column.name + COUNTS]
        length = counts.shape[1]
        array = pa.ListArray.from_arrays(_offsets(counts.reshape(-1)), array)
    if column.side == pb.USER:
        return array
    return pa.ListArray.from_arrays(_offsets(np.full(rows, length)), array)


def _offsets(counts: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())


def _padded(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Makes a matrix of rows that may have different lengths; what is missing is 0, empty or NO_SCORE."""
    width = int(lengths.max(initial=0))
    missing = {"f": NO_SCORE, "i": 0, "O": b""}[values.dtype.kind]
    padded = np.full((len(lengths), width), missing, values.dtype)
    padded[np.arange(width) < lengths[:, None]] = values
    return padded
