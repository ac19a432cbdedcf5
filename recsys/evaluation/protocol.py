"""The protocol of an evaluation: what its figures depend on besides model and rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys import protos as pb
from recsys.config.declarations import model_of


def protocol(pipeline: pb.Pipeline) -> dict[str, Any]:
    """Returns the settings of a resolved config that decide how a split is measured, by name.

    `ties`, the order of events of one instant, is added if the preparation tools noted it: it is the entry of
    `schema.json` in the folder around `data.vocabulary_dir`.
    """
    found: dict[str, Any] = dict(model_of(pipeline).protocol)
    path = Path(pipeline.data.vocabulary_dir).parent / "schema.json"
    if pipeline.data.vocabulary_dir and path.is_file():
        try:
            schema = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return found
        if isinstance(schema, Mapping) and isinstance(schema.get("ties"), Mapping):
            found["ties"] = dict(schema["ties"])
    return found


def describe(settings: Mapping[str, Any]) -> str:
    """Words a protocol as one line, such as `seen REMOVE, query_time TARGET, ties file`."""
    words = {
        name: value["order"] if name == "ties" and "order" in value else value
        for name, value in settings.items()
    }
    return ", ".join(f"{name} {value}" for name, value in words.items())
