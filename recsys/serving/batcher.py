"""Puts requests that wait at the same time into one batch, which a single thread computes.

The call of a package holds Python's global lock, so a second thread would gain nothing. The queue is bounded,
and a request that could not be answered in time is never computed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

Request, Answer = TypeVar("Request"), TypeVar("Answer")

log = logging.getLogger(__name__)


class QueueFullError(Exception):
    """The queue has no room for the rows of a request."""


class ClosedError(Exception):
    """The batcher no longer accepts requests."""


class DeadlineError(Exception):
    """The deadline of a request passed before its computation began."""


@dataclass(frozen=True)
class BatchLimits:
    """Bounds of batches and of the queue.

    Attributes:
        max_batch: most rows of a batch; a single request may have more.
        max_wait: seconds that the first request of a batch waits for others.
        max_queue: most rows that wait. An empty queue also accepts a request with more rows.
    """

    max_batch: int
    max_wait: float
    max_queue: int


@dataclass(eq=False)
class _Waiting(Generic[Request, Answer]):
    """A request in the queue; times are those of `time.monotonic`."""

    request: Request
    rows: int
    deadline: float
    arrived: float
    answer: "Future[Answer]"


class Batcher(Generic[Request, Answer]):
    """A bounded queue and the thread that empties it.

    Args:
        run: computes one answer for each request of a batch, in order; an answer that is an exception is
            raised for its request only. If `run` raises an error for several requests, it is called for each
            of them alone, so that only those that cause the error get it.
        limits: bounds of batches and queue.
        observe: called with the number of rows of each batch.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Request]], Sequence[Answer | Exception]],
        limits: BatchLimits,
        observe: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._run, self._limits, self._observe = run, limits, observe
        self._queue: deque[_Waiting[Request, Answer]] = deque()
        self._rows = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="forward", daemon=True)
        self._thread.start()

    @property
    def waiting_rows(self) -> int:
        """The number of rows of all requests in the queue."""
        return self._rows

    @property
    def is_alive(self) -> bool:
        """Returns whether the thread is running."""
        return self._thread.is_alive()

    def submit(self, request: Request, rows: int, deadline: float) -> "Future[Answer]":
        """Puts a request into the queue.

        Args:
            request: the request, as `run` takes it.
            rows: number of rows of the request.
            deadline: time of `time.monotonic` after which nobody waits for the answer.

        Returns:
            A future of the answer. Its error is that of `run`, or DeadlineError.

        Raises:
            QueueFullError: there is no room.
            ClosedError: `close` was called.
        """
        with self._changed:
            if self._closed:
                raise ClosedError
            if self._queue and self._rows + rows > self._limits.max_queue:
                raise QueueFullError
            waiting = _Waiting(request, rows, deadline, time.monotonic(), Future())
            self._queue.append(waiting)
            self._rows += rows
            self._changed.notify()
        return waiting.answer

    def close(self, timeout: float | None = None) -> bool:
        """Stops accepting requests, answers the waiting ones, and ends the thread.

        Returns:
            False if `timeout` seconds were not enough.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while batch := self._take():
            now = time.monotonic()
            for waiting in batch:
                # A request whose client has gone is cancelled.
                if waiting.answer.set_running_or_notify_cancel() and waiting.deadline <= now:
                    waiting.answer.set_exception(DeadlineError())
            live = [waiting for waiting in batch if not waiting.answer.done()]
            if live:
                self._observe(sum(waiting.rows for waiting in live))
                self._answer(live)

    def _take(self) -> list[_Waiting[Request, Answer]]:
        """Waits for a batch; empty when the batcher is closed and nothing waits."""
        limits = self._limits
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if self._queue:
                until = self._queue[0].arrived + limits.max_wait
                while self._rows < limits.max_batch and not self._closed:
                    seconds_left = until - time.monotonic()
                    if seconds_left <= 0:
                        break
                    self._changed.wait(seconds_left)
            batch: list[_Waiting[Request, Answer]] = []
            rows = 0
            while self._queue and (not batch or rows + self._queue[0].rows <= limits.max_batch):
                batch.append(self._queue.popleft())
                rows += batch[-1].rows
            self._rows -= rows
            return batch

    def _answer(self, batch: Sequence[_Waiting[Request, Answer]]) -> None:
        try:
            answers = self._run([waiting.request for waiting in batch])
            for waiting, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    waiting.answer.set_exception(answer)
                else:
                    waiting.answer.set_result(answer)
        except Exception as error:  # noqa: BLE001  whoever waits for the answer gets it
            undone = [waiting for waiting in batch if not waiting.answer.done()]
            if len(undone) == 1:
                undone[0].answer.set_exception(error)
                return
            log.info("a batch of %d requests failed (%s), each is computed alone", len(batch), error)
            for waiting in undone:
                self._answer([waiting])
