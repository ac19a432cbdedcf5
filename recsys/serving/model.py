"""A package that answers requests: validation, and the queue in front of the processes that score rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from recsys.config import features
from recsys.errors import ConfigError
from recsys.serving.batcher import Batcher, BatchLimits
from recsys.serving.messages import Columns, Loaded, Order, RowBatch
from recsys.serving.metrics import Metrics
from recsys.serving.schema import (
    MOST_FINDINGS,
    Failure,
    Finding,
    InvalidRequestError,
    RequestLimits,
    RequestSchema,
    output_types,
)
from recsys.serving.scoring_process import ScoringProcess, start


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

    def _run(self, process: ScoringProcess, batch: Sequence[Prepared]) -> list[Columns | Exception]:
        """Has the rows of all requests scored together. A request with a bad row gets an error."""
        scored = process.score(row_batch(self.schema, batch, self._keeps_users))
        self._metrics.observe(scored)
        answers: list[Columns | Exception] = []
        end = 0
        for prepared in batch:
            start, end = end, end + len(prepared.rows)
            bad = {
                place: scored.bad_rows[row]
                for place, row in zip(prepared.places, range(start, end), strict=True)
                if row in scored.bad_rows
            }
            if bad:
                answers.append(_refused(bad))
                continue
            mine = {name: values[start:end] for name, values in scored.columns.items()}
            if self.recommends:
                mine = {name: [row[: prepared.k] for row in values] for name, values in mine.items()}
            answers.append(mine)
        return answers


def schema_of(loaded: Loaded, requests: RequestLimits) -> RequestSchema:
    """Returns the schema of a loaded package's requests and answers."""
    outputs = output_types(loaded.pipeline, loaded.outputs, loaded.searched)
    keys = list(loaded.pipeline.data.key_columns)
    return RequestSchema(loaded.pipeline, keys, outputs, loaded.max_items, requests)


def row_batch(schema: RequestSchema, batch: Sequence[Prepared], keeps_users: bool) -> RowBatch:
    """Joins the rows of requests. A store of users knows them by the first key column, as text."""
    rows = [row for prepared in batch for row in prepared.rows]
    users = None
    if keeps_users:
        users = [None if (user := schema.user(row)) is None else str(user) for row in rows]
    return RowBatch(schema.columns(rows), max(prepared.k for prepared in batch), users)


def _refused(bad: dict[int, str]) -> InvalidRequestError:
    """Returns the error about a request's bad rows, given a sentence for each by its index."""
    findings = [Finding(field=f"rows[{row}]", message=sentence) for row, sentence in bad.items()]
    more = len(findings) - MOST_FINDINGS
    said = f"rows are bad{f'; {more} more findings' if more > 0 else ''}"
    return InvalidRequestError(422, Failure(error=said, findings=findings[:MOST_FINDINGS]))
