"""Defines `Finding`, a fault with the path of its field, and walks over messages with their paths."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from google.protobuf.message import Message

from recsys.config.fields import name_of


class Finding(NamedTuple):
    """One fault of a config.

    Attributes:
        path: path of the field, e.g. `features[0].id.table`.
        text: the given value, the allowed ones, and what to do.
        missing: True if something is missing, perhaps because the text has a mistake.
    """

    path: str
    text: str
    missing: bool = False


class Child(NamedTuple):
    """A message inside another message, with its path."""

    message: Message
    path: str


def join(path: str, name: str) -> str:
    """Joins the path of a message and the name of a field in it; the root's path is empty."""
    return f"{path}.{name}" if path else name


def children(message: Message, path: str) -> Iterator[Child]:
    """Yields the messages that are set directly inside `message`, with their paths."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        place = join(path, name_of(field))
        if field.is_repeated:
            yield from (Child(inner, f"{place}[{index}]") for index, inner in enumerate(value))
        else:
            yield Child(value, place)


def descend(message: Message, path: str = "") -> Iterator[Child]:
    """Yields `message` and every message inside it, in the order of the schema."""
    yield Child(message, path)
    for inner, place in children(message, path):
        yield from descend(inner, place)


def lines(findings: Iterable[Finding], locations: Mapping[str, str]) -> list[str]:
    """Writes each finding as a line that begins with the location of its field or of the nearest enclosing
    message."""
    messages = []
    for path, text, _ in findings:
        place = path
        while place and place not in locations:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        where = locations.get(place)
        messages.append(f"{where}: {path}: {text}" if where else f"{path}: {text}")
    return messages
