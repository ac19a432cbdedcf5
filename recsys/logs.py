"""The log of a command: handlers for stderr and `log.txt`, and a mark for lines that only the file has."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from recsys.errors import RecsysError

FILE_ONLY = {"file_only": True}
"""Pass this as `extra` of a logging call to write the line to `log.txt` only: the console already shows its
content, as in a progress bar."""


@contextmanager
def log_to_stderr(level: str) -> Iterator[None]:
    """Sends the log to stderr: the whole log of the first process, and the warnings of other processes."""
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    chosen = level.upper() if is_first_process() else "WARNING"
    handler.setLevel(chosen)
    handler.addFilter(is_for_console)
    with _handler(handler, chosen):
        yield


@contextmanager
def log_to_file(run_dir: Path) -> Iterator[None]:
    """Appends the log of the first process to `run_dir/log.txt`.

    Raises:
        RecsysError: the folder cannot be written.
    """
    if not is_first_process():
        yield
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(run_dir / "log.txt")
    except OSError as error:
        raise RecsysError(f"--run-dir {run_dir}: cannot be written: {error.strerror or error}") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    with _handler(handler, None):
        yield


def is_first_process() -> bool:
    """Returns whether this process writes the log: rank 0, or the only process."""
    # Before a process group exists, this variable of torchrun is the only source of the rank.
    return os.environ.get("RANK", "0") == "0"


def is_for_console(record: logging.LogRecord) -> bool:
    """Returns whether the console shows a record: all but those marked `FILE_ONLY`. A filter for handlers."""
    return not getattr(record, "file_only", False)


class _StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`, which a progress bar replaces in order to stay below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


class _FileHandler(logging.FileHandler):
    """Writes `log.txt`. If a line cannot be written (full disk), later lines go to stderr only."""

    def __init__(self, path: Path):
        # File names in log lines may hold bytes that are not UTF-8.
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._path = path
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._failed:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._failed = True
        # Printed, because a log line about this failure would end up here again.
        print(f"{self._path} ends here, it cannot be written: {error}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError) if self._failed else nullcontext():
            super().close()


@contextmanager
def _handler(handler: logging.Handler, level: str | None) -> Iterator[None]:
    # The level applies to this package. Libraries log a lot at level info, so only their warnings are shown.
    root, package = logging.getLogger(), logging.getLogger("recsys")
    before = package.level
    root.addHandler(handler)
    if level is not None:
        package.setLevel(level)
    try:
        yield
    finally:
        package.setLevel(before)
        root.removeHandler(handler)
        handler.close()
