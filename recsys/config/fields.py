"""Reads and writes the fields of messages, among them extensions that other packages declare.

A holder is a message with one choice, such as `pb.Mixer`: one field of its oneof is set, or one extension,
whose name a config writes in brackets: `mixer { [acme.gru] { num_layers: 2 } }`. An extension is a field of
the holder like any other, except that protobuf keeps it out of `DESCRIPTOR.fields`, `WhichOneof` and
`getattr`; the functions below hide that difference.
"""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MessageOrType = Message | type[Message]


def name_of(field: FieldDescriptor) -> str:
    """Returns the field's name as a config writes it: `hstu`, or `[acme.gru]` for an extension."""
    return f"[{field.full_name}]" if field.is_extension else field.name


def value_of(message: Message, field: FieldDescriptor) -> Any:
    """Returns a field's value, which is an empty message for a message that is not set."""
    return message.Extensions[field] if field.is_extension else getattr(message, field.name)


def is_set(message: Message, field: FieldDescriptor) -> bool:
    """Returns whether a field, which must not be repeated, is present."""
    return message.HasExtension(field) if field.is_extension else message.HasField(field.name)


def clear(message: Message, field: FieldDescriptor) -> None:
    """Makes a field absent."""
    message.ClearExtension(field) if field.is_extension else message.ClearField(field.name)


def extensions(message: MessageOrType) -> list[FieldDescriptor]:
    """Lists the extensions of a message that imported packages declare, in the order of their numbers."""
    descriptor = message.DESCRIPTOR
    if not descriptor.is_extendable:
        return []
    return sorted(descriptor.file.pool.FindAllExtensions(descriptor), key=lambda field: field.number)


def all_of(message: MessageOrType) -> list[FieldDescriptor]:
    """Lists every field that a config may set in a message: first the message's fields, then extensions."""
    return [*message.DESCRIPTOR.fields, *extensions(message)]


def find(message: MessageOrType, name: str) -> FieldDescriptor | None:
    """Returns the field with a name such as `hstu` or `[acme.gru]`, or None if there is no such field."""
    if name.startswith("["):
        return next((field for field in extensions(message) if name_of(field) == name), None)
    return message.DESCRIPTOR.fields_by_name.get(name)


def alternatives(holder: MessageOrType) -> list[FieldDescriptor]:
    """Lists the fields of which a holder takes one: first the fields of its oneof, then extensions."""
    return [field for oneof in holder.DESCRIPTOR.oneofs for field in oneof.fields] + extensions(holder)


def rivals(message: MessageOrType, field: FieldDescriptor) -> list[FieldDescriptor]:
    """Lists the fields that may not be set together with `field`."""
    if field.is_extension or (field.containing_oneof is not None and message.DESCRIPTOR.is_extendable):
        listed = alternatives(message)
    else:
        listed = list(field.containing_oneof.fields) if field.containing_oneof is not None else []
    return [rival for rival in listed if rival.full_name != field.full_name]


def chosen(holder: Message) -> FieldDescriptor | None:
    """Returns the alternative that is set in a holder, or None if none is set."""
    return next((field for field in alternatives(holder) if is_set(holder, field)), None)


def type_of(field: FieldDescriptor) -> type[Message]:
    """Returns the class of the messages that a field holds."""
    return field.message_type._concrete_class
