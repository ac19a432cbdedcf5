"""Ends a run of several processes when one of them is stopped or stuck, with an error that names it.

A rank that is stopped (SIGSTOP, a host that is gone) or stuck lets all others wait in a collective. gloo and
NCCL end such a wait, but name neither rank nor step. So a thread of each rank posts a `Beat` to the store of
the process group, ten times in `train.rank_timeout`, and the first two ranks watch the beats of all. A step
only sets attributes for that thread: it sends nothing and waits for nothing, least of all for a GPU.

Others that were looked at: `monitored_barrier` names ranks, but is a collective of its own in each step;
torchrun's timers (TORCHELASTIC_ENABLE_FILE_TIMER) end every process that exceeds its time, thus also those
that wait, and name none.
"""

import faulthandler
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from recsys import typed_json
from recsys.errors import LostProcessError
from recsys.training.distributed import Processes

TOGETHER = "computing"
"""Place of a rank that computes a step, in whose collectives it may wait for others."""

READING, APART, ENDED = "reading a batch", "between two steps", "ended"

BEATS = 10
"""Beats in `train.rank_timeout`. As many missing beats are too many."""

_WATCHERS = 2
"""Number of ranks that watch all: one may be the rank that is stopped."""

_LOST = "heartbeat/lost"

Item = TypeVar("Item")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """A sign of life of a rank.

    Attributes:
        number: counts the beats of the process.
        step: the step that the rank computes, or has computed last.
        place: what its main thread is doing, such as `READING`.
        beats_there: number of beats since the main thread has gone there.
        process: host and process id.
    """

    number: int
    step: int
    place: str
    beats_there: int
    process: str


@dataclass(frozen=True)
class Verdict:
    """The ranks that make the others wait, and the message of the error that ends the run."""

    ranks: list[int]
    message: str


class Heartbeat:
    """Posts beats while the block runs, and ends this process if a rank is stopped or stuck.

    A single process has no heartbeat.

    Attributes:
        step: the step that this rank computes, or has computed last.

    Args:
        processes: this rank.
        timeout: seconds after which a rank that does not answer, or does not come, ends the run.
    """

    def __init__(self, processes: Processes, timeout: float) -> None:
        self.step = 0
        self._rank, self._world_size = processes.rank, processes.world_size
        self._timeout = timeout
        self._process = f"pid {os.getpid()} on {socket.gethostname()}"
        self._place, self._moves = APART, 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Heartbeat":
        if self._world_size > 1:
            # The main thread may wait in the store's connection, so the beats have one of their own.
            store = _get_default_store().clone()
            store.set_timeout(timedelta(seconds=self._timeout))
            # Only ranks with a beat are watched, and this one may be stopped before its thread has run.
            self._post(store, Beat(0, self.step, self._place, 0, self._process))
            self._thread = threading.Thread(target=self._run, args=[store], name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Tells other ranks what this one does in the block."""
        before, self._place = self._place, place
        self._moves += 1
        try:
            yield
        finally:
            self._place = before
            self._moves += 1

    def reading(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yields `items`; while the next one is awaited, this rank is reading."""
        while True:
            with self.at(READING):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def _run(self, store: dist.Store) -> None:
        number = moves = beats_there = 0
        watch = Watch(self._timeout)
        try:
            while True:
                ends = self._stop.wait(self._timeout / BEATS)
                place = ENDED if ends else self._place
                beats_there = beats_there + 1 if moves == self._moves else 0
                moves, number = self._moves, number + 1
                self._post(store, Beat(number, self.step, place, beats_there, self._process))
                if ends:
                    return
                if self._rank < _WATCHERS and (seen := watch.look(self._beats(store))):
                    store.set(_LOST, json.dumps(asdict(seen)))
                if store.check([_LOST]):
                    self._end(typed_json.parse(store.get(_LOST), Verdict))
        except dist.DistError as error:
            # Whoever holds the store (torchrun or rank 0) is gone. The main thread may wait for it forever.
            if not self._stop.is_set():
                self._end(Verdict([], f"the store through which ranks meet is gone ({error})"))

    def _post(self, store: dist.Store, beat: Beat) -> None:
        store.set(_key(self._rank), json.dumps(asdict(beat)))

    def _beats(self, store: dist.Store) -> dict[int, Beat]:
        """Returns the beats of the ranks that have had one."""
        keys = {rank: _key(rank) for rank in range(self._world_size)}
        if not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get(list(keys.values()))
        return {rank: typed_json.parse(value, Beat) for rank, value in zip(keys, values, strict=True)}

    def _end(self, verdict: Verdict) -> NoReturn:
        """Ends the process at once. Its main thread may wait in a collective that nothing can interrupt."""
        log.log(logging.ERROR if self._rank < _WATCHERS else logging.INFO, "%s", verdict.message)
        if self._rank in verdict.ranks:
            faulthandler.dump_traceback(2)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            get_error_handler().record_exception(LostProcessError(verdict.message))
        logging.shutdown()
        os._exit(LostProcessError.exit_code)


class Watch:
    """Compares beats with earlier ones.

    It counts looks instead of time, so a pause of the watching process or the machine makes no rank late.

    Args:
        timeout: as in `Heartbeat`, for the message.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._beats: dict[int, Beat] = {}
        self._silent: dict[int, int] = {}

    def look(self, beats: dict[int, Beat]) -> Verdict | None:
        """Returns which ranks make the others wait, if there are any. Call it once a beat."""
        running = {rank: beat for rank, beat in beats.items() if beat.place != ENDED}
        for rank, beat in running.items():
            same = self._beats.get(rank) == beat
            self._silent[rank] = self._silent.get(rank, 0) + 1 if same else 0
        self._beats = beats
        stopped = [rank for rank in running if self._silent[rank] >= BEATS]
        if stopped:
            return self._verdict(stopped, "not answered")
        stuck = {rank: beat for rank, beat in running.items() if beat.beats_there >= BEATS}
        waiting = [beat.step for beat in stuck.values() if beat.place == TOGETHER]
        late = [
            rank
            for rank, beat in stuck.items()
            if waiting and (beat.place != TOGETHER or beat.step < max(waiting))
        ]
        return self._verdict(late, "not come") if late else None

    def _verdict(self, ranks: list[int], problem: str) -> Verdict:
        newest = max(beat.step for beat in self._beats.values())
        named = "; ".join(
            f"rank {rank} ({beat.process}) has {problem} for {self._timeout:g} s and was last seen "
            f"at step {beat.step}, {beat.place}"
            for rank, beat in self._beats.items()
            if rank in ranks
        )
        advice = "torchrun --max-restarts starts it again, and train.rank_timeout sets the time"
        return Verdict(
            ranks,
            f"{named}; the run was in step {newest} and resumes from its newest checkpoint: {advice}",
        )


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
