"""A package that answers requests: validation, and the queue in front of the processes that score rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import pyarrow as pa

from recsys.config import features
from recsys.data.schema.contract import file_columns
from recsys.errors import ConfigError
from recsys.serving.arrow_schema import ArrowBody, ArrowSchema
from recsys.serving.batcher import Batcher, BatchLimits
from recsys.serving.messages import Columns, Loaded, Order, RowBatch
from recsys.serving.metrics import Metrics
from recsys.serving.rows import ArrowRows, JsonRows, Rows
from recsys.serving.schema import (
    Finding,
    InvalidRequestError,
    RequestLimits,
    RequestSchema,
    output_types,
    unfit,
)
from recsys.serving.scoring_process import ScoringProcess, start

Body = bytes | dict[str, Any] | ArrowBody
"""A request: JSON, the object that it would describe, or an Arrow stream."""


@dataclass(frozen=True)
class Prepared:
    """A validated request.

    Attributes:
        rows: its rows.
        k: number of items to recommend for each row; 0 for a model that scores candidates.
        places: the places of the rows in the request that they come from.
    """

    rows: Rows
    k: int
    places: Sequence[int]


class ServingModel:
    """A package that answers requests: its processes, the queue in front, and the schema of requests.

    Args:
        order: the package.
        requests: bounds of a request.
        batches: bounds of batches and of the queue.
        metrics: counts batches.
        processes: number of processes, each of which loads the package and scores one batch at a time.

    Attributes:
        folder: folder of the package.
        pipeline: the package's config.
        version: step, and the beginning of the hash of the package's manifest.
        recommends: True if it searches items, False if it scores candidates.

    Raises:
        ConfigError: several processes are asked for, and the package keeps users.
        RecsysError, OSError, ImportError: the package cannot be used.
    """

    def __init__(
        self,
        order: Order,
        requests: RequestLimits,
        batches: BatchLimits,
        metrics: Metrics,
        processes: int = 1,
    ) -> None:
        self._processes = start(order, processes)
        loaded = self._processes[0].loaded
        if loaded.keeps_users and processes > 1:
            self.kill()
            raise ConfigError(
                f"--processes: {order.folder} keeps users, whom one of several processes would not know; "
                "give 1, or start several servers and send each user to one of them"
            )
        self.folder, self.pipeline, self.version = order.folder, loaded.pipeline, loaded.version
        self.recommends = loaded.searched is not None
        self._candidates = None if self.recommends else features.candidate_item(self.pipeline)
        self.schema = schema_of(loaded, requests)
        self._arrow = ArrowSchema(file_columns(self.pipeline, "predict"), self.schema.keys, requests)
        self._keeps_users, self._metrics = loaded.keeps_users, metrics
        runs = [partial(self._run, process) for process in self._processes]
        self.batcher: Batcher[Prepared, Columns] = Batcher(runs, batches, metrics.batch_rows.observe)

    @property
    def is_alive(self) -> bool:
        """Whether the processes and the threads that fill them are running."""
        return self.batcher.is_alive and all(process.is_alive for process in self._processes)

    @property
    def ending(self) -> str:
        """Tells how a process has ended, as the end of a sentence."""
        ended = [process for process in self._processes if not process.is_alive]
        return (ended or self._processes)[0].ending

    @property
    def memory_bytes(self) -> int | None:
        """Resident memory of the processes; None where the system does not tell."""
        memory = [process.memory_bytes for process in self._processes]
        return None if None in memory else sum(filter(None, memory))

    def close(self, timeout: float | None = None) -> bool:
        """Answers waiting requests and ends the processes.

        Returns:
            False if `timeout` seconds were not enough; the processes were killed then.
        """
        if not self.batcher.close(timeout):
            self.kill()
            return False
        for process in self._processes:
            process.close()
        return True

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self._processes:
            process.kill()

    def prepare(self, body: Body) -> Prepared:
        """Validates a request. Its rows are converted with those of its batch.

        Args:
            body: JSON, the object that it would describe, or an Arrow stream.

        Raises:
            InvalidRequestError: the body cannot be read, or does not fit the schema; names field and row.
        """
        if isinstance(body, ArrowBody):
            columns = self._arrow.parse(body.stream)
            return Prepared(ArrowRows(columns), self.schema.count(body.k), range(columns.num_rows))
        request = self.schema.parse(body)
        k = request.k if self.recommends else 0
        return Prepared(JsonRows(self.schema, request.rows), k, range(len(request.rows)))

    def answer_rows(self, prepared: Prepared, columns: Columns) -> list[dict[str, Any]]:
        """Returns the rows of the response: the columns of an answer beside the request's keys."""
        echoed = self.schema.keys + ([] if self._candidates is None else [self._candidates])
        answered = {name: prepared.rows.values(name) for name in echoed} | columns
        return [dict(zip(answered, row, strict=True)) for row in zip(*answered.values(), strict=True)]

    def _run(self, process: ScoringProcess, batch: Sequence[Prepared]) -> list[Columns | Exception]:
        """Has the rows of all requests scored together. A request with a bad row gets an error."""
        # `row_batch` puts rows of JSON first.
        order = sorted(range(len(batch)), key=lambda i: batch[i].rows.columns is not None)
        scored = process.score(row_batch(self.schema, [batch[i] for i in order], self._keeps_users))
        self._metrics.observe(scored)
        answers: dict[int, Columns | Exception] = {}
        end = 0
        for i in order:
            prepared = batch[i]
            start, end = end, end + len(prepared.rows)
            bad = {
                place: scored.bad_rows[row]
                for place, row in zip(prepared.places, range(start, end), strict=True)
                if row in scored.bad_rows
            }
            if bad:
                answers[i] = _refused(bad)
                continue
            mine = {name: values[start:end] for name, values in scored.columns.items()}
            if self.recommends:
                mine = {name: [row[: prepared.k] for row in values] for name, values in mine.items()}
            answers[i] = mine
        return [answers[i] for i in range(len(batch))]


def schema_of(loaded: Loaded, requests: RequestLimits) -> RequestSchema:
    """Returns the schema of a loaded package's requests and answers."""
    outputs = output_types(loaded.pipeline, loaded.outputs, loaded.searched)
    keys = list(loaded.pipeline.data.key_columns)
    return RequestSchema(loaded.pipeline, keys, outputs, loaded.max_items, requests)


def row_batch(schema: RequestSchema, batch: Sequence[Prepared], keeps_users: bool) -> RowBatch:
    """Joins the rows of requests, of which those that came as JSON are the first.

    A store of users knows them by the first key column, as text.
    """
    parts = [prepared.rows for prepared in batch]
    users = None
    if keeps_users:
        users = [None if user is None else str(user) for rows in parts for user in users_of(schema, rows)]
    models = [model for rows in parts for model in rows.models]
    columns = schema.columns(models) if models else {}
    batches = [_read(schema, rows.columns) for rows in parts if rows.columns is not None]
    streams = [_stream(alike) for _, alike in groupby(batches, key=lambda batch: batch.schema)]
    return RowBatch(columns, max(prepared.k for prepared in batch), users, streams)


def users_of(schema: RequestSchema, rows: Rows) -> list[Any]:
    """Returns the first key column of rows; None for a row without it, or if the package has none."""
    return rows.values(schema.keys[0]) if schema.keys else [None] * len(rows)


def _read(schema: RequestSchema, columns: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the columns that the package reads, in its order."""
    given = set(columns.schema.names)
    return columns.select([name for name in schema.read if name in given])


def _stream(batches: Iterable[pa.RecordBatch]) -> bytes:
    """Returns rows with the same columns as an Arrow IPC stream."""
    table, sink = pa.Table.from_batches(batches), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _refused(bad: dict[int, str]) -> InvalidRequestError:
    """Returns the error about a request's bad rows, given a sentence for each by its index."""
    return unfit([Finding(field=f"rows[{row}]", message=said) for row, said in bad.items()], "rows are bad")
