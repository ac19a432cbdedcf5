"""Runs a function in a thread while training goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(function: Callable[[], Result], name: str) -> Future[Result]:
    """Calls a function in a thread that does not keep the process alive.

    Args:
        function: what is called; the future raises what it raises.
        name: name of the thread.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  (whoever waits for the future raises it)
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
