"""Base class of hooks that send a run to a tracking service, such as Weights & Biases or MLflow.

Training neither waits for a service nor fails with it. A separate thread makes all requests, in the order of
the records. Only the first failed request is logged; `metrics.jsonl` has every record anyway. The run folder
keeps the service's id of the run, so that a run that continues after a stop stays one run at the service.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

from recsys import files
from recsys.training.hooks.base import Evaluated, Hook, Outcome, Run, SplitMetrics, Trained
from recsys.training.hooks.scalars import train_scalars, validation_scalars

LONGEST_WAIT = 30.0
"""Wait at most this many seconds at the end for pending requests.

Meanwhile the other ranks wait for rank 0 in collectives that time out after 90 s, and a scheduler may kill
the run some time after SIGTERM.
"""

RETRY_AFTER = 30.0
"""Seconds between two attempts to reach a service that did not answer when the run began."""

_ID = re.compile(r"[\w-]{1,128}")

log = logging.getLogger(__name__)


class Tracker(Hook):
    """Sends the scalars of every record, settings, test metrics and the outcome to a service.

    A subclass makes the requests in `connect`, `log`, `log_tested` and `disconnect`. Only the thread calls
    these; they may raise any exception.
    """

    service: ClassVar[str]
    """Name of the service, for the log."""

    id_file: ClassVar[str]
    """Name of the file in the run folder that holds the id of the run."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._outcome: Outcome | None = None
        self._failed = False

    def connect(self, folder: Path, run: Run | None) -> None:
        """Opens the run of `folder` at the service; `run` is None if only `tested` continues it."""
        raise NotImplementedError

    def log(self, scalars: Mapping[str, float], step: int, seconds: float) -> None:
        """Sends finite values of a step, measured at `seconds` since 1970."""
        raise NotImplementedError

    def log_tested(self, scalars: Mapping[str, float], step: int) -> None:
        """Sends finite metrics of the test rows; `step` is the step of the evaluated state."""
        raise NotImplementedError

    def disconnect(self, outcome: Outcome | None, *, training: bool) -> None:
        """Ends the run at the service. If `training` and `outcome` is None, an error ended training."""
        raise NotImplementedError

    def started(self, run: Run) -> None:
        """Starts the thread, which connects."""
        self._start(lambda: self.connect(run.folder, run), training=True)

    def trained(self, record: Trained) -> None:
        """Sends losses, learning rates, gradient norm, speed and memory."""
        self._send(train_scalars(record), record.step)

    def evaluated(self, record: Evaluated) -> None:
        """Sends all metrics."""
        self._send(validation_scalars(record), record.step)

    def finished(self, outcome: Outcome) -> None:
        """Keeps the outcome for `close`."""
        self._outcome = outcome

    def tested(self, record: SplitMetrics) -> None:
        """Adds metrics of the test rows to the run, if the service knows it."""
        if record.split != "test" or self.read_id(record.folder) is None:
            return
        scalars = _finite({f"test/{name}": value for name, value in record.metrics.items()})
        self._start(lambda: self.connect(record.folder, None), training=False)
        self._requests.put(lambda: self.log_tested(scalars, record.step))
        self.close()

    def close(self) -> None:
        """Waits at most `LONGEST_WAIT` seconds for the last requests."""
        if self._thread is None:
            return
        self._closing.set()
        self._requests.put(None)
        self._thread.join(LONGEST_WAIT)
        if self._thread.is_alive():
            log.warning(
                "%s did not accept all records within %.0f s; metrics.jsonl has them",
                self.service,
                LONGEST_WAIT,
            )
        elif self._failed:
            log.warning("%s did not receive all records; metrics.jsonl has them", self.service)

    def read_id(self, folder: Path) -> str | None:
        """Returns the service's id of the run; None if the service does not know the run yet."""
        path = folder / self.id_file
        try:
            text = path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError):
            text = ""
        if not _ID.fullmatch(text):
            log.warning("%s: holds no valid run id, so %s starts a new run", path, self.service)
            return None
        return text

    def write_id(self, folder: Path, run_id: str) -> None:
        """Stores the service's id of the run in the run folder."""
        files.write_text(folder / self.id_file, run_id + "\n")

    def _start(self, connect: Callable[[], None], *, training: bool) -> None:
        self._thread = threading.Thread(
            target=self._work, args=(connect, training), name=self.service, daemon=True
        )
        self._thread.start()

    def _send(self, scalars: Mapping[str, float], step: int) -> None:
        finite, seconds = _finite(scalars), time.time()
        self._requests.put(lambda: self.log(finite, step, seconds))

    def _work(self, connect: Callable[[], None], training: bool) -> None:
        """Connects, makes requests until it takes None from the queue, and disconnects."""
        while not self._succeeds(connect):
            if self._closing.wait(RETRY_AFTER):
                return
        for request in iter(self._requests.get, None):
            self._succeeds(request)
        self._succeeds(lambda: self.disconnect(self._outcome, training=training))

    def _succeeds(self, request: Callable[[], None]) -> bool:
        try:
            request()
        except Exception as error:  # noqa: BLE001  clients may raise anything, but training continues
            self._warn(f"{type(error).__name__}: {error}")
            return False
        return True

    def _warn(self, fault: str) -> None:
        """Logs the first fault of the service."""
        if not self._failed:
            self._failed = True
            log.warning(
                "%s: %s. Nothing else is affected; the run folder has all records", self.service, fault
            )


def _finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if math.isfinite(value)}
