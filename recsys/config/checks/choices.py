"""Reads the options of a choice in the schema, such as the labels that a loss needs (`protos/options.proto`).

Because the schema holds these facts, a component that is added to a oneof needs no table anywhere else.
"""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields


def labels(field: FieldDescriptor) -> list[str]:
    """Returns the kinds of labels that a choice of loss or metric fits; empty if the schema names none."""
    return list(field.GetOptions().Extensions[pb.labels])


def models(field: FieldDescriptor) -> list[str]:
    """Returns the families that take the sequences of a choice of preprocessor; empty if the schema names
    none."""
    return list(field.GetOptions().Extensions[pb.models])


def directed(field: FieldDescriptor) -> bool:
    """Returns whether higher or lower values of a metric are better; False if the best lies in between."""
    return not field.GetOptions().Extensions[pb.undirected]


def part(message: Message, name: str) -> Message | None:
    """Returns the message in a field, or None if the field is not set or does not exist."""
    is_field = name in message.DESCRIPTOR.fields_by_name
    return getattr(message, name) if is_field and message.HasField(name) else None


def loss_kind(loss: pb.Loss) -> str | None:
    """Returns the kind of labels that a task with this loss has: `binary`, `regression` or `retrieval`.

    Returns None if there is no loss, or if the schema names no kind for it, which another rule reports.
    """
    field = fields.chosen(loss)
    if field is None:
        return None
    # A loss that contains another loss takes the labels of the inner one.
    around = [labels(inner) for inner, _ in fields.value_of(loss, field).ListFields()]
    return next((kinds[0] for kinds in (*around, labels(field)) if kinds), None)
