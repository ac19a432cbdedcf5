"""Catches signals that ask a run to stop; the run stops between two steps."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HANDLED = (signal.SIGINT, signal.SIGTERM)

WRITE_FAILED = 0
"""Key under which ranks count checkpoints that could not be written; no signal has this number."""


@contextmanager
def catching_signals(received: dict[int, int], *, announce: bool = False) -> Iterator[None]:
    """Counts SIGINT and SIGTERM in `received`; a second signal of the same kind has its default effect.

    With `announce`, a note on stderr acknowledges the signal at once, since a running evaluation delays the
    stop. Only the main thread of a process can catch signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in HANDLED}

    def note(number: int, _frame: object) -> None:
        received[number] += 1
        signal.signal(number, before[number])
        if announce:
            # Do not use the log: the signal may have arrived while the log's lock is held.
            os.write(2, f"\nsignal {number}: stopping after this step; a second one stops at once\n".encode())

    for number in HANDLED:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
