"""Marks log lines for `log.txt` alone: the console already shows their content, as in a progress bar."""

import logging

FILE_ONLY = {"file_only": True}
"""Pass this as `extra` of a logging call to write the line to `log.txt` only."""


def is_for_console(record: logging.LogRecord) -> bool:
    """Returns whether the console shows a record: all but those marked `FILE_ONLY`. A filter for handlers."""
    return not getattr(record, "file_only", False)
