"""A signal asks a run to stop; the run stops between two steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

HANDLED = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def catching_signals(received: dict[int, int]) -> Iterator[None]:
    """Counts SIGINT and SIGTERM in `received`; a second one of a kind acts as it would without us."""
    before = {number: signal.getsignal(number) for number in HANDLED}

    def note(number: int, _frame: object) -> None:
        received[number] += 1
        signal.signal(number, before[number])

    for number in HANDLED:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
