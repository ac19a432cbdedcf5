"""Starts reader processes as forks of a server that has already done their imports.

A reader needs pyarrow and `workers.reader`, but neither torch nor models. This module imports none of these,
so that a command can start the server first and do its own imports at the same time.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

from recsys.config import extensions

_IMPORTS = ["recsys.data.workers.pool"]


def context() -> BaseContext:
    """Returns the context that starts processes. It does not fork this process, as the fork could hang in a
    lock that a thread holds."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    # The server imports the modules of other packages once, so that its forks need not.
    chosen.set_forkserver_preload([*_IMPORTS, *extensions.loaded()])
    return chosen


def start_server() -> None:
    """Starts the server early. Call it before slow imports; else the first batch starts it and waits.

    The server and its forks inherit a mask that blocks SIGINT and SIGTERM, because signals that stop a run
    must not stop them.
    """
    if context().get_start_method() == "forkserver":
        # The resource tracker unblocks signals when it starts, so it must start first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def main_module_not_imported(arguments: bytes) -> Iterator[None]:
    """Makes processes that start in the block leave out the import of the main module.

    multiprocessing imports the script that runs into every new process, so that it can unpickle classes of
    the script. A script that trains imports torch, which takes seconds for each reader of each evaluation.

    Args:
        arguments: what the processes will unpickle. If it needs the main module, or extensions of the config
            are registered there, the module is imported.
    """
    main = sys.modules["__main__"]
    if b"__main__" in arguments or "__main__" in extensions.loaded():
        yield
        return
    # multiprocessing looks for the module by these two attributes.
    hidden = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    vars(main).update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        vars(main).update(hidden)


def leave_group() -> None:
    """Leaves the process group of the run, so that SIGTERM ends a reader only if sent to the reader itself.

    `timeout` and torchrun send SIGTERM to the whole process group of a run, and the training process then
    still needs batches to finish its step and save its state.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # drops a signal that came meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
