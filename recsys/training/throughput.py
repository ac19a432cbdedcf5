"""How fast a run is, and how long it waits for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Rates:
    """Speed over an interval, all ranks together.

    Attributes:
        batches_per_s, samples_per_s, tokens_per_s: per second of training; evaluation and saving do not
            count.
        data_wait: share of that time, 0 to 1, in which this rank waited for its reader.
    """

    batches_per_s: float
    samples_per_s: float
    tokens_per_s: float
    data_wait: float


class Meter:
    """Counts work and clocks it."""

    def __init__(self) -> None:
        self._samples = self._tokens = self._batches = 0
        self._waited = self._paused = 0.0
        self._began = time.perf_counter()

    def watch(self, items: Iterator[Item]) -> Iterator[Item]:
        """`items`, with the time it takes to get each of them counted as waiting."""
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield item

    def add(self, samples: int, tokens: int, batches: int) -> None:
        """Counts work that is done."""
        self._samples += samples
        self._tokens += tokens
        self._batches += batches

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this block is not training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def take(self) -> Rates:
        """Speed since the last call."""
        now = time.perf_counter()
        seconds = max(now - self._began - self._paused, 1e-9)
        rates = Rates(
            batches_per_s=self._batches / seconds,
            samples_per_s=self._samples / seconds,
            tokens_per_s=self._tokens / seconds,
            data_wait=min(self._waited / seconds, 1.0),
        )
        self._samples = self._tokens = self._batches = 0
        self._waited = self._paused = 0.0
        self._began = now
        return rates
