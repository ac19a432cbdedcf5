"""Checks the columns of a request that comes as an Arrow stream, without a Python object for each value."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.data.arrow import first_line, is_text
from recsys.data.schema.contract import FileColumn, type_findings
from recsys.serving.arrow_stream import is_accepted, read_batches, read_schema
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

_LONGEST_NAME = 256
"""Most characters of a column's name, which an answer may repeat."""


@dataclass(frozen=True)
class ArrowBody:
    """The body of a request that is an Arrow stream.

    Attributes:
        stream: the stream.
        k: number of items to recommend, as the URL says it; None if it says none.
    """

    stream: bytes
    k: str | None


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
        self._keys, self._most_rows = key_columns, limits.rows
        bounds = {pb.HISTORY: limits.history, pb.CANDIDATE: limits.candidates}
        self._longest = {column.name: bounds[column.side] for column in columns if column.side in bounds}
        # Clients send the same schema again and again. Its description takes longer to read than the rows.
        self._schema_of = lru_cache(maxsize=16)(self._checked)

    def parse(self, stream: bytes) -> pa.RecordBatch:
        """Returns the rows of a stream.

        Raises:
            InvalidRequestError: status 400 if this is no Arrow stream of the accepted kind, 422 if it does
                not fit.
        """
        try:
            batches = self._batches(stream)
        except struct.error:
            raise _malformed("it is damaged") from None
        except (ValueError, OSError, pa.ArrowException) as error:
            raise _malformed(first_line(error)) from None
        if len(batches) == 1:
            return batches[0]
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]

    def _batches(self, stream: bytes) -> list[pa.RecordBatch]:
        rows, batches = 0, []
        for count, batch in enumerate(read_batches(stream, self._schema_of), 1):
            for what, number in (("rows", rows + batch.num_rows), ("batches", count)):
                if number > self._most_rows:
                    raise refused("rows", f"there are more than {self._most_rows:,} {what}; send fewer")
            if batch.num_rows:
                self._require_lengths(batch, rows)
                batches.append(batch)
                rows += batch.num_rows
        if not rows:
            raise refused("rows", "send at least one row")
        return batches

    def _checked(self, description: bytes) -> pa.Schema:
        """Returns the schema of a stream, whose columns are among those that the package reads."""
        given = read_schema(description)
        kinds = dict(zip(given.names, given.types, strict=True))
        findings = []
        for name, count in Counter(given.names).items():
            if len(name) > _LONGEST_NAME:
                raise _malformed(f"the name of a column has {len(name):,} characters")
            if count > 1:
                findings.append(Finding(field=name, message=f"the column occurs {count} times; send it once"))
            elif not is_accepted(kinds[name]):
                said = "send integers, float32, float64, string or lists of these, without a dictionary"
                findings.append(Finding(field=name, message=f"its type is {kinds[name]}; {said}"[:500]))
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
        return given

    def _require_lengths(self, batch: pa.RecordBatch, first_row: int) -> None:
        findings = []
        for array, name in zip(batch.columns, batch.schema.names, strict=True):
            most = self._longest.get(name)
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
