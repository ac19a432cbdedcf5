"""Writes a message as text that `parser` reads back as the same message, with remarks after fields."""

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys.config.fields import name_of
from recsys.config.textproto.scalars import quote

_WIDTH = 100


def write(message: Message, remarks: Mapping[str, str] | None = None) -> str:
    """Writes every field that is set, one per line.

    Args:
        remarks: comments that follow fields, by a path such as `features[0].id.table`.
    """
    return "".join(f"{line}\n" for line in _lines(message, "", "", remarks or {}))


def _lines(message: Message, path: str, indent: str, remarks: Mapping[str, str]) -> Iterator[str]:
    for field, value in message.ListFields():
        name = name_of(field)
        field_path = f"{path}.{name}" if path else name
        if field.message_type is not None:
            for index, inner in enumerate(value) if field.is_repeated else [(None, value)]:
                place = field_path if index is None else f"{field_path}[{index}]"
                remark = _remark(place, remarks)
                inside = list(_lines(inner, place, f"{indent}  ", remarks))
                if inside:
                    yield f"{indent}{name} {{{remark}"
                    yield from inside
                    yield f"{indent}}}"
                else:
                    yield f"{indent}{name} {{}}{remark}"
        elif field.is_repeated:
            yield from _list(
                field, [_scalar(field, item) for item in value], indent, _remark(field_path, remarks)
            )
        else:
            yield f"{indent}{field.name}: {_scalar(field, value)}{_remark(field_path, remarks)}"


def _list(field: FieldDescriptor, items: list[str], indent: str, remark: str) -> Iterator[str]:
    line = f"{indent}{field.name}: [{', '.join(items)}]"
    if len(line) <= _WIDTH:
        yield f"{line}{remark}"
        return
    yield f"{indent}{field.name}: [{remark}"
    for item in items[:-1]:
        yield f"{indent}  {item},"
    yield f"{indent}  {items[-1]}"
    yield f"{indent}]"


def _remark(path: str, remarks: Mapping[str, str]) -> str:
    return f"  # {' '.join(remarks[path].split())}" if path in remarks else ""


def _scalar(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return quote(value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return "true" if value else "false"
    return repr(value)
