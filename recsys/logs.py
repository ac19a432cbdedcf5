"""Marks log lines for `log.txt` alone: the console shows their content already, as in a progress bar."""

import logging

FILE_ONLY = {"file_only": True}
"""Pass this as `extra` of a logging call to write the line to `log.txt` only."""


def is_for_console(record: logging.LogRecord) -> bool:
    """Filter of the console's handler: drops lines marked `FILE_ONLY`."""
    return not getattr(record, "file_only", False)
