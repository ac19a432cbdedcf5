"""Converts single values of the text format: tokens to Python values, and strings back to text.

`parser` and `writer` build on this module.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

_INTEGER = re.compile(r"(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"(?:(?:0|[1-9][0-9]*)\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?\Z")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}
_WRITTEN = {character: f"\\{letter}" for letter, character in _ESCAPES.items() if character != "'"}
_TRUTH = dict.fromkeys(("true", "True", "t", "1"), True) | dict.fromkeys(("false", "False", "f", "0"), False)
_RANGE = {
    FieldDescriptor.CPPTYPE_INT32: ("int32", -(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: ("int64", -(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: ("uint32", 0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: ("uint64", 0, 2**64 - 1),
}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


class Token(NamedTuple):
    """A token of the text. `kind` is word, number, string, mark or end; `line` and `column` count from 1."""

    kind: str
    text: str
    line: int
    column: int


class Mistake(Exception):
    """A value that does not fit its field; the text names the given value and the allowed values."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Returns `Did you mean x?` with the name nearest to `word`, or else the list of allowed names."""
    names = list(allowed)
    near = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else f"Allowed here: {', '.join(names) or 'nothing'}."


def enum_names(field: FieldDescriptor) -> list[str]:
    """Returns the names that may be written for an enum field: all but the one that means 'not set'."""
    return [value.name for value in field.enum_type.values if value.number != 0]


def quote(text: str) -> str:
    """Quotes a string as text format does."""
    return '"' + "".join(_WRITTEN.get(c, c) for c in text) + '"'


def kind_of(field: FieldDescriptor) -> str:
    """Describes the values that a field accepts."""
    if field.message_type is not None:
        return f"{field.message_type.name} in braces"
    if field.enum_type is not None:
        return f"one of {', '.join(enum_names(field))}"
    if field.cpp_type in _RANGE:
        return f"a whole number ({_RANGE[field.cpp_type][0]})"
    if field.cpp_type in _FLOATS:
        return "a number"
    return "true or false" if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL else "a string in quotes"


def convert(field: FieldDescriptor, tokens: list[Token]) -> Any:
    """Converts the tokens of a scalar to a Python value; raises Mistake if they do not fit the field."""
    negative, last = tokens[0].text == "-", tokens[-1]
    given = "".join(token.text for token in tokens)
    mistake = Mistake(f"expected {kind_of(field)}, found {given}")
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if last.kind != "string" or negative:
            raise mistake
        return "".join(_unquote(token.text) for token in tokens)
    if field.enum_type is not None:
        if last.kind != "word" or negative:
            raise mistake
        if last.text not in enum_names(field):
            names = enum_names(field)
            raise Mistake(f"no value {last.text}. {did_you_mean(last.text, names)}")
        return field.enum_type.values_by_name[last.text].number
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if negative or last.text not in _TRUTH:
            raise mistake
        return _TRUTH[last.text]
    if last.kind != "number" and last.text.lower() in ("nan", "inf", "infinity"):
        raise Mistake(f"{given} is not allowed; give a finite number")
    if last.kind != "number" or last.text == "-":
        raise mistake
    sign = -1 if negative else 1
    if field.cpp_type in _FLOATS:
        return sign * _finite(last.text, given, mistake)
    return _integer(field, last.text, sign, given, mistake)


def _finite(text: str, given: str, mistake: Mistake) -> float:
    if not _FLOAT.match(text):
        raise mistake
    value = float(text)
    if not math.isfinite(value):
        raise Mistake(f"{given} is too large for a number; give a finite one")
    return value


def _integer(field: FieldDescriptor, text: str, sign: int, given: str, mistake: Mistake) -> int:
    if not _INTEGER.match(text):
        raise mistake
    name, low, high = _RANGE[field.cpp_type]
    # Python refuses to convert very long numbers; the first 99 digits are enough, as they are too large, too.
    value = sign * int(text[:99])
    if not low <= value <= high:
        raise Mistake(f"{given} does not fit {name}; allowed is {low} to {high}")
    return value


def _unquote(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1] not in _ESCAPES:
            raise Mistake(f"unknown escape {match[0]} in a string; allowed are \\n \\t \\r \\\\ \\\" \\'")
        return _ESCAPES[match[1]]

    inner = _ESCAPE.sub(replace, text[1:-1])
    if any("\ud800" <= c <= "\udfff" for c in inner):
        raise Mistake("a string that is not valid UTF-8")
    return inner
