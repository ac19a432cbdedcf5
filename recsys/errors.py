"""Defines the errors that end a command, each with the exit code of its kind.

This module imports nothing from the package. A message says where the error is (file:line, field path, row),
what was given, what is allowed and what to do; `recsys.cli.main` prints it without a traceback.
"""


def shortened(value: object) -> str:
    """Returns the `repr` of a value for a message; a long one is shortened in the middle."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:50]}...{shown[-20:]} ({len(shown):,} characters)"


class RecsysError(Exception):
    """Base class of the errors that are meant for users; exit code 1 (run-time error)."""

    exit_code = 1


class ConfigError(RecsysError):
    """Reports a .config or a command line that cannot be used; exit code 2.

    Args:
        findings: every problem that was found, one line each.
    """

    exit_code = 2

    def __init__(self, findings: list[str] | str):
        self.findings = [findings] if isinstance(findings, str) else list(findings)
        super().__init__("\n".join(self.findings))

    def __reduce__(self):
        return (type(self), (self.findings,))


class DataError(RecsysError):
    """Reports a file or row that breaks the data contract; exit code 3."""

    exit_code = 3


class NonFiniteLossError(RecsysError):
    """Reports a loss that is NaN or infinite; exit code 4.

    The step has changed the weights by then; that state is neither saved nor evaluated.
    """

    exit_code = 4


class Terminated(RecsysError):
    """Reports that a signal ended the run, with its state saved; exit code 128 + the signal's number.

    Args:
        message: says what was saved and how to continue.
        signal_number: SIGTERM (15, exit code 143) unless given.
    """

    def __init__(self, message: str, signal_number: int = 15):
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number

    def __reduce__(self):
        return (type(self), (str(self), self.signal_number))


class LostProcessError(RecsysError):
    """Reports that a run ended because one of its ranks is stopped, stuck or gone; exit code 6."""

    exit_code = 6


class InstallationError(RecsysError):
    """Reports a missing or mismatched part of the installation; exit code 5."""

    exit_code = 5
