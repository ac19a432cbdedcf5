"""Log lines for `log.txt` alone: those that something else shows on the console, such as a progress bar."""

import logging

FILE_ONLY = {"file_only": True}
"""What a logging call gives as `extra`."""


def is_for_console(record: logging.LogRecord) -> bool:
    """A filter of the console's handler."""
    return not getattr(record, "file_only", False)
