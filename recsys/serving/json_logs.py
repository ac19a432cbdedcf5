"""Log lines as JSON objects, one a line."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; entries of its attribute `fields` stand beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextmanager
def json_lines() -> Iterator[None]:
    """Makes all present handlers of the root logger write JSON for the block."""
    handlers = list(logging.getLogger().handlers)
    before = [handler.formatter for handler in handlers]
    for handler in handlers:
        handler.setFormatter(JsonFormatter())
    try:
        yield
    finally:
        for handler, formatter in zip(handlers, before, strict=True):
            handler.setFormatter(formatter)
