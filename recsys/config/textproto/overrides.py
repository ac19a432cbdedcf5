"""Applies command-line overrides such as `train.num_steps=100` or `features[0].id.embedding_dim=32`."""

import re
from collections.abc import MutableMapping
from typing import NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys.config import fields
from recsys.config.textproto.names import field_of
from recsys.config.textproto.parser import assign
from recsys.config.textproto.scalars import Mistake

_STEP = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|\[[A-Za-z0-9_.]+\])(?:\[([0-9]{1,9})\])?\Z")
_DOT = re.compile(r"\.(?![^\[\]]*\])")
"""Matches a dot between two fields, but not a dot in the brackets of an extension's name."""


def override(message: Message, assignment: str, locations: MutableMapping[str, str]) -> list[str]:
    """Sets one field of a message in place.

    Args:
        assignment: `path=value` with the value in text format: a number, a name, a string with or without
            quotes, `[a, b]` for a whole repeated field, `{...}` for a message. `path=` clears the field.
            Spaces around the value are ignored, unless they are in quotes.
        locations: the place where each field was set, by field path; updated in place.

    Returns:
        Findings, each of which begins with `--set <assignment>`. If there are any, do not use the message.
    """
    where = f"--set {assignment}"
    path, equals, value = assignment.partition("=")
    path = path.strip()
    if not equals:
        return [f"{where}: expected path=value, for example train.num_steps=100"]
    try:
        place = _find(message, path)
    except _BadPath as error:
        return [f"{where}: {error}"]
    parsed = assign(value.strip(), place.message, place.field, path, where)
    for location in [
        location
        for location in locations
        if location == path or location.startswith((f"{path}.", f"{path}["))
    ]:
        del locations[location]
    locations.update(parsed.locations)
    return parsed.findings


class _Place(NamedTuple):
    message: Message
    field: FieldDescriptor


class _BadPath(Exception):
    """A path that does not exist; the text names the wrong step and the fields that exist there."""


def _find(message: Message, path: str) -> _Place:
    """Returns the field at the end of a path, and creates absent messages on the way."""
    steps = _DOT.split(path)
    for depth, step in enumerate(steps, 1):
        prefix, last = ".".join(steps[:depth]), depth == len(steps)
        match = _STEP.match(step)
        if match is None:
            raise _BadPath(f"{step!r} is not a field name, or NAME[INDEX] for an element of a repeated field")
        name, index = match[1], match[2]
        try:
            field = field_of(message, name)
        except Mistake as mistake:
            raise _BadPath(f"{prefix}: {mistake}") from None
        if last and index is None:
            return _Place(message, field)
        if last:
            raise _BadPath(f"{prefix}: one element cannot be replaced; give all of them: {name}=[...]")
        if field.message_type is None:
            raise _BadPath(f"{prefix}: has no fields of its own, so nothing can follow it in the path")
        message = _step(message, field, index, prefix)
    raise _BadPath("the path is empty")


def _step(message: Message, field: FieldDescriptor, index: str | None, prefix: str) -> Message:
    """Returns the message that `field` holds, at `index` for a repeated field."""
    inner = fields.value_of(message, field)
    if field.is_repeated:
        if index is None:
            raise _BadPath(f"{prefix}: repeated; say which one, for example {field.name}[0]")
        if int(index) >= len(inner):
            raise _BadPath(f"{prefix}: there are {len(inner)}, counted from 0")
        return inner[int(index)]
    if index is not None:
        raise _BadPath(f"{prefix}: not repeated; leave [{index}] out")
    for rival in fields.rivals(message, field):
        if fields.is_set(message, rival):
            chosen = fields.name_of(rival)
            raise _BadPath(f"{prefix}: {chosen} is chosen; replace it first: {prefix}={{...}}")
    return inner
