"""Checks the columns of a request that comes as an Arrow stream, without a Python object for each value."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.data.arrow import first_line, is_text
from recsys.data.schema.contract import FileColumn, type_findings
from recsys.serving.arrow_stream import read_messages, read_rows, read_schema
from recsys.serving.schema import (
    MOST_FINDINGS,
    Failure,
    Finding,
    InvalidRequestError,
    RequestLimits,
    refused,
    unfit,
)

CONTENT_TYPE = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class ArrowBody:
    """The body of a request that is an Arrow stream.

    Attributes:
        stream: the stream.
        k: number of items to recommend, as the URL says it; None if it says none.
    """

    stream: bytes
    k: str | None


class _Plan(NamedTuple):
    """The columns of streams that begin with the same bytes.

    Attributes:
        schema: their names and types.
        most: for each column, the most elements of a list; None if it has none, or they are not bounded.
    """

    schema: pa.Schema
    most: list[int | None]


class ArrowSchema:
    """The columns of a request, which are those of the input of `recsys predict`.

    Nulls, numbers that are not finite and lists of unequal length are found when rows are converted.

    Args:
        columns: the columns that the package reads.
        key_columns: names of columns that are returned unchanged; optional.
        limits: bounds of a request.
    """

    def __init__(
        self, columns: Sequence[FileColumn], key_columns: Sequence[str], limits: RequestLimits
    ) -> None:
        self._columns = {column.name: column for column in columns}
        self._keys, self._limits = key_columns, limits
        # Clients send the same schema again and again. Its description takes longer to read than the rows.
        self._plan = lru_cache(maxsize=16)(self._checked)

    def parse(self, stream: bytes) -> pa.RecordBatch:
        """Returns the rows of a stream.

        Raises:
            InvalidRequestError: status 400 if this is no Arrow stream of the accepted kind, 422 if it does
                not fit.
        """
        try:
            batches = self._batches(stream)
        except (StopIteration, struct.error):
            raise _malformed("it is cut off or damaged") from None
        except (ValueError, OSError, pa.ArrowException) as error:
            raise _malformed(first_line(error)) from None
        if len(batches) == 1:
            return batches[0]
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]

    def _batches(self, stream: bytes) -> list[pa.RecordBatch]:
        messages = read_messages(stream)
        plan = self._plan(next(messages).metadata)
        memory, rows, batches = pa.py_buffer(stream), 0, []
        for count, message in enumerate(messages, 1):
            batch = read_rows(memory, message, plan.schema, rows, self._limits.rows)
            if count > self._limits.rows:
                raise refused("rows", f"the stream has more than {self._limits.rows} batches")
            if batch.num_rows:
                self._require_lengths(batch, plan, rows)
                batches.append(batch)
                rows += batch.num_rows
        if not rows:
            raise refused("rows", "send at least one row")
        return batches

    def _checked(self, metadata: bytes) -> _Plan:
        """Compares the columns of a stream with those that the package reads."""
        given = read_schema(metadata)
        kinds = dict(zip(given.names, given.types, strict=True))
        findings = []
        for name, count in Counter(given.names).items():
            if count > 1:
                findings.append(Finding(field=name, message=f"the column occurs {count} times; send it once"))
            elif name in self._columns:
                problems = type_findings(kinds[name], self._columns[name])
                findings += [Finding(field=name, message=problem) for problem in problems]
            elif name not in self._keys:
                findings.append(Finding(field=name, message="the package reads no such column; leave it out"))
            elif not (pa.types.is_integer(kinds[name]) or is_text(kinds[name])):
                said = f"the column is {kinds[name]}; a key is an integer or a text"
                findings.append(Finding(field=name, message=said))
        for name, column in self._columns.items():
            if column.required and name not in kinds:
                findings.append(Finding(field=name, message="the column is missing"))
        if findings:
            raise unfit(findings)
        bounds = {pb.HISTORY: self._limits.history, pb.CANDIDATE: self._limits.candidates}
        most = {name: bounds[column.side] for name, column in self._columns.items() if column.side in bounds}
        return _Plan(given, [most.get(name) for name in kinds])

    def _require_lengths(self, batch: pa.RecordBatch, plan: _Plan, first_row: int) -> None:
        findings = []
        for array, name, most in zip(batch.columns, batch.schema.names, plan.most, strict=True):
            if most is None or len(array.values) <= most:
                continue
            lengths = np.diff(array.offsets.to_numpy())
            for row in np.flatnonzero(lengths > most)[:MOST_FINDINGS].tolist():
                said = f"the list has {lengths[row]} elements; it may have at most {most}"
                findings.append(Finding(field=f"rows[{first_row + row}].{name}", message=said))
        if findings:
            raise unfit(findings)


def _malformed(reason: str) -> InvalidRequestError:
    said = f"the body is not an Arrow IPC stream that can be read: {reason}"
    return InvalidRequestError(400, Failure(error=said))
