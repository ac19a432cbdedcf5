"""Starts processes that score as forks of a server that has imported PyTorch, so that a reload need not.

The server computes nothing, because a fork lacks the threads that a computation leaves behind. It leaves CUDA
alone, which its forks could not use otherwise. It ends when the process that it serves and all forks have
ended.
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
    """Returns the context that starts processes, as forks of the server unless a fork is not safe."""
    if not _leaves_cuda_alone():
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


def _leaves_cuda_alone() -> bool:
    """Whether libraries can be imported without an initialisation of CUDA: they count GPUs, by NVML if that
    works, else by CUDA."""
    driver = environment.driver_version()
    return sys.platform == "linux" and (driver is None or not driver.startswith("unknown"))
