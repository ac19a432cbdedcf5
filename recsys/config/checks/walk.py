"""Findings with the path of their field, and a walk over a message that keeps paths."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from google.protobuf.message import Message


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
        path: of the field, e.g. `model.ranker.tasks[0].loss`.
        text: what was given, what is allowed, what to do.
        missing: it is about something that is not there, perhaps since the text has a mistake.
    """

    path: str
    text: str
    missing: bool = False


class Child(NamedTuple):
    """A message inside another one."""

    message: Message
    path: str


def join(path: str, name: str) -> str:
    """Path of a field inside the message at `path`; the root's path is empty."""
    return f"{path}.{name}" if path else name


def children(message: Message, path: str) -> Iterator[Child]:
    """Messages directly inside `message` that are set, with their paths."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        place = join(path, field.name)
        if field.is_repeated:
            yield from (Child(inner, f"{place}[{index}]") for index, inner in enumerate(value))
        else:
            yield Child(value, place)


def descend(message: Message, path: str = "") -> Iterator[Child]:
    """`message` and every message inside it, in the order of the schema."""
    yield Child(message, path)
    for inner, place in children(message, path):
        yield from descend(inner, place)


def lines(findings: Iterable[Finding], locations: Mapping[str, str]) -> list[str]:
    """Findings as text, each beginning with the place of its field or of the nearest message around it."""
    found = []
    for path, text, _ in findings:
        place = path
        while place and place not in locations:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        where = locations.get(place)
        found.append(f"{where}: {path}: {text}" if where else f"{path}: {text}")
    return found
