"""Starts reader processes as forks of a server that has already done their imports.

A reader needs pyarrow and `workers.reader`, but neither torch nor models. This module imports none of them,
so that a command can start the server first and do its own imports at the same time.
"""

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

from recsys.config import extensions

_IMPORTS = ["recsys.data.workers.pool"]


def context() -> BaseContext:
    """Returns the way to start processes; a fork of this one could hang in a lock held by a thread."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    # Modules of other packages are imported once, by the server, and not by each of its forks.
    chosen.set_forkserver_preload([*_IMPORTS, *extensions.loaded()])
    return chosen


def start_server() -> None:
    """Starts the server, which the first batch would otherwise start and wait for; call it before slow
    imports.

    The server inherits that SIGINT and SIGTERM are blocked: signals that stop a run are not for it and its
    forks.
    """
    if context().get_start_method() == "forkserver":
        # The resource tracker unblocks signals when it starts, so it comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_group() -> None:
    """Leaves the process group of the run, so that SIGTERM ends a reader only when it is sent to it alone.

    `timeout` and torchrun send SIGTERM to the whole group of a run, whose training process then needs batches
    to finish its step and save its state.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops a signal that came meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
