"""Puts requests that wait at the same time into one batch, which one of a few threads has computed.

Each thread waits for its process that scores, which takes one batch after the other. The queue is bounded,
and a request that could not be answered in time is never computed. All answers of a batch reach the event
loop in one call: at each call the loop takes Python's lock, and the thread waits until it gets the lock back.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

Request, Answer = TypeVar("Request"), TypeVar("Answer")
Run = Callable[[Sequence[Request]], Sequence[Answer | Exception]]

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
    answer: "asyncio.Future[Answer]"


class Batcher(Generic[Request, Answer]):
    """A bounded queue and the threads that empty it. All requests come from one event loop.

    Args:
        runs: one for each thread. It computes one answer for each request of a batch, in order; an answer
            that is an exception is raised for its request only. If it raises an error for several requests,
            it is called for each of them alone, so that only those that cause the error get it.
        limits: bounds of batches and queue.
        observe: called with the number of rows of each batch.
    """

    def __init__(
        self,
        runs: "Sequence[Run[Request, Answer]]",
        limits: BatchLimits,
        observe: Callable[[int], None] = lambda rows: None,
    ) -> None:
        self._limits, self._observe = limits, observe
        self._queue: deque[_Waiting[Request, Answer]] = deque()
        self._rows = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, args=(run,), name=f"forward {number}", daemon=True)
            for number, run in enumerate(runs)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting_rows(self) -> int:
        """The number of rows of all requests in the queue."""
        return self._rows

    @property
    def is_alive(self) -> bool:
        """Returns whether all threads are running."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, request: Request, rows: int, deadline: float) -> "asyncio.Future[Answer]":
        """Puts a request into the queue. Call it in the event loop that waits for the answer.

        Args:
            request: the request, as `runs` take it.
            rows: number of rows of the request.
            deadline: time of `time.monotonic` after which nobody waits for the answer.

        Returns:
            A future of the answer. Its error is that of `runs`, or DeadlineError. Unless its computation has
            begun, a request whose future is cancelled is not computed.

        Raises:
            QueueFullError: there is no room.
            ClosedError: `close` was called.
        """
        with self._changed:
            if self._closed:
                raise ClosedError
            if self._queue and self._rows + rows > self._limits.max_queue:
                raise QueueFullError
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            waiting = _Waiting(request, rows, deadline, time.monotonic(), answer)
            self._queue.append(waiting)
            self._rows += rows
            self._changed.notify()
        return waiting.answer

    def close(self, timeout: float | None = None) -> bool:
        """Stops accepting requests, answers the waiting ones, and ends the threads.

        Returns:
            False if `timeout` seconds were not enough.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, run: "Run[Request, Answer]") -> None:
        while batch := self._take():
            now = time.monotonic()
            late = [waiting for waiting in batch if waiting.deadline <= now]
            if late:
                _deliver([(waiting, DeadlineError()) for waiting in late])
            # A request whose client has gone is cancelled.
            live = [waiting for waiting in batch if waiting.deadline > now and not waiting.answer.cancelled()]
            if live:
                self._observe(sum(waiting.rows for waiting in live))
                self._answer(live, run)

    def _take(self) -> list[_Waiting[Request, Answer]]:
        """Waits for a batch; empty when the batcher is closed and nothing waits."""
        limits = self._limits
        with self._changed:
            # Another thread may empty the queue while this one waits for more rows.
            while not self._queue or (seconds_left := self._seconds_left()) > 0:
                if self._queue:
                    self._changed.wait(seconds_left)
                elif self._closed:
                    return []
                else:
                    self._changed.wait()
            batch: list[_Waiting[Request, Answer]] = []
            rows = 0
            while self._queue and (not batch or rows + self._queue[0].rows <= limits.max_batch):
                batch.append(self._queue.popleft())
                rows += batch[-1].rows
            self._rows -= rows
            return batch

    def _seconds_left(self) -> float:
        """Returns how long the requests in the queue still wait for others."""
        if self._closed or self._rows >= self._limits.max_batch:
            return 0.0
        return self._queue[0].arrived + self._limits.max_wait - time.monotonic()

    def _answer(self, batch: Sequence[_Waiting[Request, Answer]], run: "Run[Request, Answer]") -> None:
        try:
            answers = run([waiting.request for waiting in batch])
            answered = list(zip(batch, answers, strict=True))
        except Exception as error:  # noqa: BLE001  whoever waits for the answer gets it
            if len(batch) == 1:
                _deliver([(batch[0], error)])
                return
            log.info("a batch of %d requests failed (%s), each is computed alone", len(batch), error)
            for waiting in batch:
                self._answer([waiting], run)
        else:
            _deliver(answered)


def _deliver(answered: Sequence[tuple[_Waiting[Request, Answer], Answer | Exception]]) -> None:
    """Lets the event loop set the results of the requests' futures."""

    def set_results() -> None:
        for waiting, answer in answered:
            if waiting.answer.cancelled():
                continue
            if isinstance(answer, Exception):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)

    # A loop that has ended raises RuntimeError: nobody waits for these answers.
    with suppress(RuntimeError):
        answered[0][0].answer.get_loop().call_soon_threadsafe(set_results)
