"""Reads JSON into declared types, so that a damaged file causes an error that names the damaged entry.

`parse(text, Progress)` returns a `Progress` whose fields have the types that the dataclass declares.
"""

import dataclasses
import json
import math
import types
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")

_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


def parse(text: str | bytes, kind: type[T]) -> T:
    """Parses a JSON text into a type.

    Args:
        text: JSON; bytes are UTF-8.
        kind: a dataclass, NamedTuple, TypedDict, list[...], dict[str, ...], int, float, str, bool, Any, or
            a union of one of these with None. Entries that a dataclass does not declare are an error; a
            TypedDict may have more entries.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or holds NaN, infinity or half a character.
        TypeError: a value is missing or has another type; the message names the entry.
    """
    text = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            _require_characters(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _typed(value, kind, "")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} in it, which JSON does not allow")


def _require_characters(value: Any) -> None:
    """Raises ValueError for an escape of half a surrogate pair, which no file or terminal can show."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} in it, which is not a character") from None


def _typed(value: Any, kind: Any, place: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        (present,) = (choice for choice in get_args(kind) if choice is not types.NoneType)
        return None if value is None else _typed(value, present, place)
    if origin is list:
        items = _require(value, list, "a list", place)
        return [_typed(item, get_args(kind)[0], f"{place}[{i}]") for i, item in enumerate(items)]
    if origin is dict or kind is dict:
        entries = _require(value, dict, "an object", place)
        inner = get_args(kind)[1] if get_args(kind) else Any
        return {name: _typed(item, inner, _inside(place, name)) for name, item in entries.items()}
    if dataclasses.is_dataclass(kind) or is_typeddict(kind):
        return _object(value, kind, place)
    if hasattr(kind, "_fields"):
        items = _require(value, list, "a list", place)
        if len(items) > len(kind._fields):
            raise TypeError(
                f"{place or 'it'} has {len(items)} entries, at most {len(kind._fields)} are expected"
            )
        named = zip(items, _hints(kind).items(), strict=False)
        return kind(*(_typed(item, hint, _inside(place, name)) for item, (name, hint) in named))
    return _number_or_text(value, kind, place)


def _object(value: Any, kind: Any, place: str) -> Any:
    entries = _require(value, dict, "an object", place)
    hints = _hints(kind)
    if is_typeddict(kind):
        optional = kind.__optional_keys__
    else:
        optional = {field.name for field in dataclasses.fields(kind) if not _has_no_default(field)}
    for name in hints:
        if name not in entries and name not in optional:
            raise TypeError(f"{_inside(place, name)} is missing")
    for name in entries:
        if name not in hints and not is_typeddict(kind):
            raise TypeError(f"{_inside(place, name)} is not known")
    typed = {name: _typed(item, hints.get(name, Any), _inside(place, name)) for name, item in entries.items()}
    return kind(**typed)


def _number_or_text(value: Any, kind: Any, place: str) -> Any:
    if type(value) is int:
        fits = kind in (int, float) and abs(value) < 2**63
    else:
        fits = type(value) is kind and (kind is not float or math.isfinite(value))
    if not fits:
        raise TypeError(f"{place or 'it'} is {str(value)[:40]!r}, expected {_WORDS[kind]}")
    return value


def _require(value: Any, kind: type, words: str, place: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{place or 'it'} is {str(value)[:40]!r}, expected {words}")
    return value


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _inside(place: str, name: str) -> str:
    return f"{place}.{name[:40]}" if place else name[:40]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
