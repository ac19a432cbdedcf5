"""Describes the protocol of an evaluation: the settings that change its results besides model and rows."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from recsys import protos as pb
from recsys import typed_json
from recsys.config.declarations import model_of

log = logging.getLogger(__name__)


class _Schema(TypedDict, total=False):
    ties: dict[str, Any]


def protocol(pipeline: pb.Pipeline) -> dict[str, Any]:
    """Returns the settings of a resolved config that decide how a split is measured, by name.

    If the preparation tools recorded `ties`, the order of events with the same time, it is added. It is an
    entry of `schema.json` in the folder around `data.vocabulary_dir`. A damaged file causes only a warning,
    because nothing else needs it.
    """
    protocol: dict[str, Any] = dict(model_of(pipeline).protocol)
    path = Path(pipeline.data.vocabulary_dir).parent / "schema.json"
    if pipeline.data.vocabulary_dir and path.is_file():
        try:
            schema = typed_json.parse(path.read_bytes(), _Schema)
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s: damaged (%s), so the order of ties is not known; prepare it again", path, error)
        else:
            protocol |= {name: value for name, value in schema.items() if name == "ties"}
    return protocol


def describe(settings: Mapping[str, Any]) -> str:
    """Formats a protocol as one line, such as `seen REMOVE, query_time TARGET, ties file`."""
    words = {
        name: value["order"] if name == "ties" and "order" in value else value
        for name, value in settings.items()
    }
    return ", ".join(f"{name} {value}" for name, value in words.items())
