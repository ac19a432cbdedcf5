"""A process of its own that loads a package and scores batches of rows.

Python runs one thread at a time, so HTTP and scoring would wait for each other within one process. The
process that speaks HTTP imports neither PyTorch nor CUDA. A pipe joins the two: one message for each batch,
one back.

The process is started by `fork_server`, and ends when the server closes the pipe, or is killed. It ignores
SIGINT and SIGTERM.
"""

import gc
import logging
import os
import pickle
import signal
from contextlib import suppress
from functools import cached_property
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path

from recsys import environment, errors
from recsys.config import extensions
from recsys.data.workers.processes import main_module_not_imported
from recsys.errors import RecsysError
from recsys.logs import log_to_stderr
from recsys.serving import fork_server
from recsys.serving.json_logs import json_lines
from recsys.serving.messages import Loaded, Order, RowBatch, Scored

_END_SECONDS = 10.0
"""Time that a process has to end once its pipe is closed."""

_EXPLAINED = (ImportError, OSError)
"""Errors of a load that a command explains to its user, besides RecsysError."""

log = logging.getLogger(__name__)


class ScoringEndedError(RecsysError):
    """The process that scores has ended by itself, or was killed."""


class ScoringError(Exception):
    """A batch could not be scored; the log has the reason."""


class ScoringProcess:
    """A process that scores. Only one thread at a time may call `score`.

    Args:
        order: what to load.
    """

    def __init__(self, order: Order) -> None:
        context = fork_server.context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, order), name=f"scoring {order.folder}")
        with fork_server.signals_blocked(), main_module_not_imported(pickle.dumps(order)):
            self._process.start()
        theirs.close()
        # multiprocessing waits at exit for processes that are left, such as that of a reload in progress.
        self._at_exit = util.Finalize(None, self._process.kill, exitpriority=10)

    @cached_property
    def loaded(self) -> Loaded:
        """Facts about the package, once it is loaded.

        Raises:
            RecsysError, OSError, ImportError: the package cannot be used.
            ScoringEndedError: the process ended before the package was loaded.
        """
        return self._receive()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.is_alive()

    @property
    def ending(self) -> str:
        """Tells how the process has ended, as the end of a sentence."""
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"has ended with exit code {code}"
        advice = "; the system does that if memory is short" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{advice}"

    @property
    def memory_bytes(self) -> int | None:
        """Resident memory of the process; None where the system does not tell."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")

    def score(self, batch: RowBatch) -> Scored:
        """Scores a batch once the package is loaded, and waits for the answer.

        Raises:
            ScoringError: the batch cannot be scored.
            ScoringEndedError: the process has ended.
        """
        _ = self.loaded
        try:
            self._connection.send(batch)
        except OSError as error:
            raise self._ended() from error
        return self._receive()

    def close(self) -> None:
        """Ends the process. No thread may be in a call of `score`."""
        self._connection.close()
        self._process.join(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once. A call of `score` raises ScoringEndedError."""
        # Once the process has ended, its number may be that of another one.
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._at_exit.cancel()

    def _receive(self) -> "Loaded | Scored":
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ended(self) -> ScoringEndedError:
        self._process.join(_END_SECONDS)
        return ScoringEndedError(f"{self._process.name}: this process {self.ending}")


def start(order: Order, count: int) -> list[ScoringProcess]:
    """Starts processes that load the same package at the same time, and waits until all have.

    Raises:
        RecsysError, OSError, ImportError: the package cannot be used, or was replaced meanwhile.
        ScoringEndedError: a process ended before the package was loaded.
    """
    processes: list[ScoringProcess] = []
    try:
        for _ in range(count):
            processes.append(ScoringProcess(order))
        if len({process.loaded.version for process in processes}) > 1:
            raise RecsysError(f"{order.folder}: the package was replaced while it was loaded; load it again")
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes


# --- in the process ---------------------------------------------------------------------------------------


def _run(connection: Connection, order: Order) -> None:
    """Loads a package, tells about it, and answers batches until the pipe is closed."""
    environment.quiet_torch()
    # A closed pipe: the server needs this process no more, or has ended.
    with log_to_stderr(order.log_level), json_lines(), suppress(EOFError, ConnectionError):
        try:
            extensions.load(order.imports)
            environment.import_torchrec_quietly()
            from recsys.inference.package import Package
            from recsys.serving.batch_scorer import BatchScorer

            package = Package(order.folder, verify_key=order.verify_key)
            package.warm_up()
            scorer = BatchScorer(package, order.store)
        except (RecsysError, *_EXPLAINED) as error:
            connection.send(_as_sent(error))
            return
        # A collection that goes through all objects of a package would take half a second.
        gc.collect()
        gc.freeze()
        connection.send(scorer.loaded)
        while True:
            batch = connection.recv()
            try:
                scored: Scored | Exception = scorer.score(batch)
            except Exception as error:
                log.error("a batch could not be scored", exc_info=error)
                scored = ScoringError(str(error))
            connection.send(scored)


def _as_sent(error: Exception) -> Exception:
    """Returns an error of a class that the server knows, since others import PyTorch."""
    if not isinstance(error, RecsysError):
        return error
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return error if type(error) is known else known(str(error))
