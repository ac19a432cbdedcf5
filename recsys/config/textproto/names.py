"""Finds the field that a name in a text or path refers to; a wrong name raises a Mistake with a hint."""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys.config import extensions, fields
from recsys.config.textproto.scalars import Mistake, did_you_mean


def field_of(message: Message, name: str) -> FieldDescriptor:
    """Returns the field of `message` with the name `name`, such as `hstu` or `[acme.gru]`.

    Raises:
        Mistake: there is no such field.
    """
    field = fields.find(message, name)
    if field is not None:
        return field
    if not name.startswith("["):
        raise Mistake(f"no such field. {did_you_mean(name, map(fields.name_of, fields.all_of(message)))}")
    raise Mistake(extensions.unknown(message, name))
