"""Logs the progress of a prediction every few seconds, with an estimate of the time left."""

import logging
import time
from collections.abc import Callable

_PAUSE = 10.0
"""Seconds between two lines."""

log = logging.getLogger(__name__)


class Progress:
    """Counts rows against the clock.

    Args:
        rows_done: returns the number of rows that are done; called at the start and before each line.
        total: the number of all rows.
        clock: returns the time in seconds.
    """

    def __init__(
        self, rows_done: Callable[[], int], total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rows_done, self._total, self._clock = rows_done, total, clock
        self._began = self._shown = clock()
        self._before = rows_done()
        if self._before:
            log.info("%s of %s rows were done before", f"{self._before:,}", f"{total:,}")

    def show(self) -> None:
        """Logs a line, unless the last one is less than 10 s old."""
        now = self._clock()
        if now - self._shown < _PAUSE:
            return
        self._shown = now
        done = self._rows_done()
        speed = (done - self._before) / (now - self._began)
        left = duration((self._total - done) / speed) if speed else "an unknown time"
        log.info(
            "%s of %s rows (%.0f %%), %s rows/s, %s left",
            f"{done:,}",
            f"{self._total:,}",
            100 * done / self._total,
            f"{speed:,.0f}",
            left,
        )


def duration(seconds: float) -> str:
    """Returns a duration in two units, such as `1 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
