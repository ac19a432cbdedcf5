"""The batcher without a model: what is computed together, what is refused, one answer for each request."""

import asyncio
import threading
import time
from concurrent.futures import Future, wait

import pytest

from recsys.serving import batcher as tested
from recsys.serving.batcher import BatchLimits, ClosedError, DeadlineError, QueueFullError

LATER = 1e12
"""A deadline that does not come."""

LOOP = asyncio.new_event_loop()


@pytest.fixture(autouse=True, scope="module")
def running_loop():
    thread = threading.Thread(target=LOOP.run_forever, daemon=True)
    thread.start()
    yield
    LOOP.call_soon_threadsafe(LOOP.stop)
    thread.join(5)
    LOOP.close()


class Batcher(tested.Batcher):
    """Has one thread unless more are asked for; passes requests of any thread on to the event loop."""

    def __init__(self, run, *rest, threads=1):
        super().__init__([run] * threads, *rest)

    def submit(self, request, rows, deadline) -> Future:
        accepted: Future[None] = Future()

        async def ask():
            try:
                answer = tested.Batcher.submit(self, request, rows, deadline)
            except Exception as error:
                accepted.set_exception(error)
                raise
            accepted.set_result(None)
            return await answer

        coming = asyncio.run_coroutine_threadsafe(ask(), LOOP)
        accepted.result(5)
        return coming


class Gate:
    """A computation that waits for `open`, and remembers its batches. The answer is twice the request."""

    def __init__(self, open_at_once: bool = False) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()
        if open_at_once:
            self._open.set()

    def __call__(self, requests):
        self.batches.append(list(requests))
        self.entered.release()
        assert self._open.wait(10)
        return [2 * request for request in requests]

    def open(self) -> None:
        self._open.set()


def limits(max_batch: int = 4, max_wait: float = 0.0, max_queue: int = 100) -> BatchLimits:
    return BatchLimits(max_batch, max_wait, max_queue)


def test_requests_that_come_within_the_wait_are_computed_together():
    gate = Gate(open_at_once=True)
    batcher = Batcher(gate, limits(max_batch=3, max_wait=30))
    answers = [batcher.submit(number, 1, LATER) for number in (5, 6, 7)]
    # The third one fills the batch, so nobody waits for 30 s.
    assert [answer.result(5) for answer in answers] == [10, 12, 14]
    assert gate.batches == [[5, 6, 7]] and batcher.close(5)


def test_a_request_alone_waits_for_others_no_longer_than_it_was_told():
    gate = Gate(open_at_once=True)
    batcher = Batcher(gate, limits(max_batch=100, max_wait=0.2))
    started = time.monotonic()
    assert batcher.submit(1, 1, LATER).result(5) == 2
    assert 0.19 <= time.monotonic() - started < 2
    assert batcher.close(5)


def test_what_comes_during_a_computation_is_the_next_batch_and_rows_bound_it():
    gate, seen = Gate(), []
    batcher = Batcher(gate, limits(max_batch=4), seen.append)
    first = batcher.submit(0, 1, LATER)
    assert gate.entered.acquire(timeout=5)
    # 3 + 1 rows fit, 2 more do not; 9 rows are more than a batch and go alone.
    answers = [batcher.submit(number, rows, LATER) for number, rows in ((1, 3), (2, 1), (3, 2), (4, 9))]
    assert batcher.waiting_rows == 15
    gate.open()
    assert [answer.result(5) for answer in (first, *answers)] == [0, 2, 4, 6, 8]
    assert gate.batches == [[0], [1, 2], [3], [4]] and seen == [1, 4, 2, 9]
    assert batcher.waiting_rows == 0 and batcher.close(5)


def test_a_full_queue_refuses_and_what_it_accepted_is_answered():
    gate = Gate()
    batcher = Batcher(gate, limits(max_queue=5))
    first = batcher.submit(0, 1, LATER)
    assert gate.entered.acquire(timeout=5)
    accepted = [batcher.submit(1, 3, LATER), batcher.submit(2, 2, LATER)]
    for rows in (1, 3):
        with pytest.raises(QueueFullError):
            batcher.submit(9, rows, LATER)
    gate.open()
    assert [answer.result(5) for answer in (first, *accepted)] == [0, 2, 4]
    # There is room again, even for more than the queue holds.
    assert batcher.submit(3, 50, LATER).result(5) == 6 and batcher.close(5)


def test_a_request_past_its_deadline_is_not_computed():
    gate = Gate()
    batcher = Batcher(gate, limits())
    first = batcher.submit(0, 1, LATER)
    assert gate.entered.acquire(timeout=5)
    late, early = batcher.submit(1, 1, time.monotonic() - 1), batcher.submit(2, 1, LATER)
    gate.open()
    with pytest.raises(DeadlineError):
        late.result(5)
    assert (first.result(5), early.result(5)) == (0, 4)
    assert gate.batches == [[0], [2]] and batcher.close(5)


def test_a_cancelled_request_is_not_computed():
    gate = Gate()
    batcher = Batcher(gate, limits())
    first = batcher.submit(0, 1, LATER)
    assert gate.entered.acquire(timeout=5)
    gone, stays = batcher.submit(1, 1, LATER), batcher.submit(2, 1, LATER)
    assert gone.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), LOOP).result(5)
    gate.open()
    assert (first.result(5), stays.result(5)) == (0, 4)
    assert gate.batches == [[0], [2]] and batcher.close(5)


def test_an_error_reaches_only_the_request_that_causes_it():
    def run(requests):
        if 3 in requests:
            raise ValueError("three")
        return [-request for request in requests]

    batcher = Batcher(run, limits(max_batch=4, max_wait=30))
    answers = [batcher.submit(number, 1, LATER) for number in (1, 2, 3, 4)]
    wait(answers, 5)
    assert [answers[i].result(0) for i in (0, 1, 3)] == [-1, -2, -4]
    with pytest.raises(ValueError, match="^three$"):
        answers[2].result(0)
    # The thread goes on.
    more = [batcher.submit(number, 1, LATER) for number in (5, 6, 7, 8)]
    assert [answer.result(5) for answer in more] == [-5, -6, -7, -8]
    assert batcher.is_alive and batcher.close(5) and not batcher.is_alive


def test_fewer_answers_than_requests_leave_none_without_one():
    batcher = Batcher(lambda requests: [0] * (len(requests) - 1), limits(max_batch=2, max_wait=30))
    for answer in [batcher.submit(number, 1, LATER) for number in (1, 2)]:
        with pytest.raises(ValueError, match="shorter"):
            answer.result(5)
    assert batcher.close(5)


def test_closing_answers_what_waits_and_refuses_the_rest():
    gate = Gate()
    batcher = Batcher(gate, limits())
    answers = [batcher.submit(0, 1, LATER)]
    assert gate.entered.acquire(timeout=5)
    answers += [batcher.submit(number, 1, LATER) for number in (1, 2)]
    assert not batcher.close(0.01)
    with pytest.raises(ClosedError):
        batcher.submit(3, 1, LATER)
    gate.open()
    assert batcher.close(5) and [answer.result(5) for answer in answers] == [0, 2, 4]


def test_many_threads_get_each_its_own_answer_once():
    batcher = Batcher(lambda requests: [r * r for r in requests], limits(max_batch=8, max_queue=40))
    refused, wrong = [0] * 8, []

    def ask(thread: int) -> None:
        for i in range(250):
            number = 1000 * thread + i
            try:
                answer: Future[int] = batcher.submit(number, 1 + i % 3, LATER)
            except QueueFullError:
                refused[thread] += 1
                continue
            if answer.result(10) != number * number:
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
    assert batcher.waiting_rows == 0 and batcher.close(5)


def test_answers_for_a_loop_that_has_ended_are_dropped_and_the_thread_goes_on():
    gate = Gate()
    batcher = tested.Batcher([gate], limits())

    async def ask(number: int) -> int:
        return await batcher.submit(number, 1, LATER)

    async def leave() -> None:
        left = asyncio.get_running_loop().create_task(ask(1))
        assert await asyncio.to_thread(gate.entered.acquire, timeout=5) and not left.done()

    asyncio.run(leave())
    gate.open()
    assert asyncio.run(ask(2)) == 4
    assert batcher.is_alive and batcher.close(5)


def test_several_threads_compute_batches_at_the_same_time_and_each_once():
    gate = Gate()
    batcher = Batcher(gate, limits(max_batch=2), threads=2)
    first = batcher.submit(0, 1, LATER)
    assert gate.entered.acquire(timeout=5)
    second = batcher.submit(1, 1, LATER)
    assert gate.entered.acquire(timeout=5), "the second thread computes beside the first"
    waiting = [batcher.submit(number, 1, LATER) for number in (2, 3, 4)]
    assert batcher.waiting_rows == 3
    gate.open()
    assert [answer.result(5) for answer in (first, second, *waiting)] == [0, 2, 4, 6, 8]
    assert sorted(sum(gate.batches, [])) == [0, 1, 2, 3, 4] and [2, 3] in gate.batches
    assert batcher.is_alive and batcher.close(5) and not batcher.is_alive


def test_a_thread_that_waits_for_more_rows_may_find_that_another_took_them():
    gate = Gate(open_at_once=True)
    batcher = Batcher(gate, limits(max_batch=2, max_wait=0.5), threads=3)
    for round_ in range(2):
        answers = [batcher.submit(10 * round_ + number, 1, LATER) for number in range(3)]
        assert [answer.result(5) for answer in answers] == [20 * round_ + 2 * number for number in range(3)]
    assert batcher.is_alive and batcher.waiting_rows == 0
    assert sorted(map(len, gate.batches)) == [1, 1, 2, 2] and batcher.close(5)
