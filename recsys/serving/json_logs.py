"""Log lines as JSON objects, one per line."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object, with the entries of its attribute `fields` beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
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
    """Makes the current handlers of the root logger write JSON during the block."""
    handlers = list(logging.getLogger().handlers)
    before = [handler.formatter for handler in handlers]
    for handler in handlers:
        handler.setFormatter(JsonFormatter())
    try:
        yield
    finally:
        for handler, formatter in zip(handlers, before, strict=True):
            handler.setFormatter(formatter)
