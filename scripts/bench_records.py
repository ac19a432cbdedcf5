"""Reads and writes records of benchmarks: dataclasses whose field `direction` is `pass` in JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def current_commit() -> str:
    """Returns the commit of the checkout; `unknown` without git."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def as_json(record: Any) -> dict[str, object]:
    """Returns a record's fields, with `direction` renamed to `pass`, which is a keyword of Python."""
    return {("pass" if name == "direction" else name): value for name, value in asdict(record).items()}


def write(path: Path | None, records: Sequence[Any], *, grow: bool = False) -> None:
    """Writes records, or appends them to those in the file.

    Args:
        path: the file, whose missing folders are created; None to write nothing.
        records: all records of this run.
        grow: whether to keep the records that are in the file.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(path.read_text()) if grow and path.exists() else []
    path.write_text(json.dumps([*earlier, *map(as_json, records)], indent=1) + "\n")
