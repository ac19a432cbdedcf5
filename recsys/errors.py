"""Errors that end a command, each with the exit code of its kind.

This module imports nothing of the package. A message says where (file:line, field path, row), what was given,
what is allowed and what to do; `recsys.cli.main` prints it without a traceback.
"""


def shortened(value: object) -> str:
    """Returns the `repr` of a value for a message, without the middle if it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:50]}...{shown[-20:]} ({len(shown):,} characters)"


class RecsysError(Exception):
    """Base of the errors that are meant for users; exit code 1 (run time)."""

    exit_code = 1


class ConfigError(RecsysError):
    """A .config or a command line that cannot be used; exit code 2.

    Args:
        findings: every problem found, one line each.
    """

    exit_code = 2

    def __init__(self, findings: list[str] | str):
        self.findings = [findings] if isinstance(findings, str) else list(findings)
        super().__init__("\n".join(self.findings))

    def __reduce__(self):
        return (type(self), (self.findings,))


class DataError(RecsysError):
    """A file or row that breaks the data contract; exit code 3."""

    exit_code = 3


class NonFiniteLossError(RecsysError):
    """A loss that is NaN or infinite, found before any weight moved; exit code 4."""

    exit_code = 4


class Terminated(RecsysError):
    """A signal ended the run in an orderly way, with its state saved. Exit code: 128 + the signal's number.

    Args:
        message: what was saved and how to go on.
        signal_number: SIGTERM (15, exit code 143) unless given.
    """

    def __init__(self, message: str, signal_number: int = 15):
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __reduce__(self):
        return (type(self), (str(self), self.signal_number))


class InstallationError(RecsysError):
    """A missing or mismatched part of the installation; exit code 5."""

    exit_code = 5
