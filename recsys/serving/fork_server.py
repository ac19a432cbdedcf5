"""Starts processes that score as forks of a server that has imported PyTorch, so that a reload need not.

The server computes nothing, because a fork lacks the threads that a computation leaves behind. It ends when
the process that it serves and all forks have ended.
"""

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext

from recsys import environment

_IMPORTS = "recsys.serving.scoring_imports"
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def context() -> BaseContext:
    """Returns the context that starts processes: as forks of the server, but anew where there may be a GPU,
    since libraries that ask for it could initialise CUDA in the server."""
    if sys.platform != "linux" or environment.driver_version() is not None:
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload([_IMPORTS])
    return chosen


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM in this thread, and in processes that start in the block.

    Ctrl-C and many supervisors send these signals to all processes of a server, and requests in flight need
    the processes that score and the server that forks them.
    """
    # The tracker of multiprocessing unblocks signals when it starts, so it must start first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
