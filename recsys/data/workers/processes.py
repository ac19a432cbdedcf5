"""Where reader processes come from: forks of a server that has done their imports.

A reader wants pyarrow and `data.reader`, but neither torch nor models. Nothing here imports any of it, so
that a command can start the server first and do its own imports beside it.
"""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

_IMPORTS = ["recsys.data.workers.pool"]


def context() -> BaseContext:
    """How they are started. A fork of this process could hang in a lock that one of its threads held."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(_IMPORTS)
    return chosen


def start_server() -> None:
    """Starts the server, which else the first batch starts and waits for; call it before slow imports.

    It inherits that SIGINT and SIGTERM are blocked: what stops a run is not for it and what it forks.
    """
    if context().get_start_method() == "forkserver":
        # The tracker unblocks the signal when it starts, so it comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_group() -> None:
    """For a reader's start: from here on SIGTERM ends it when it is sent to it alone.

    `timeout` and torchrun send it to the whole group of a run, whose training process then has a step to end
    and a state to save, for which it wants batches.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # forgets one that came meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
