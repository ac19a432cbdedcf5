"""Selects the settings that a sweep may vary, by which TensorBoard's HParams page compares runs."""

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields
from recsys.config.checks.walk import children, join

_DATA = {"batch_size", "max_history_len", "max_candidates"}
_WITHOUT_EFFECT = ("train.log_every_steps", "train.evaluation", "train.checkpoint", "train.hooks")

Value = bool | int | float | str


def hyperparameters(pipeline: pb.Pipeline) -> dict[str, Value]:
    """Returns numbers, switches and choices of a resolved config by path, defaults included.

    These are all fields of `model` and `train` that change what is learned, and the sizes in `data`. Names
    and files are not among them.
    The choice of a oneof is listed under its name: `train.schedule.decay` is "cosine". Lists become text.
    """
    settings = {f"data.{name}": value for name, value in _scalars(pipeline.data).items() if name in _DATA}
    settings |= _below(pipeline.model, "model") | _below(pipeline.train, "train")
    return {
        path: value
        for path, value in settings.items()
        if ".metrics[" not in path and not path.startswith(_WITHOUT_EFFECT)
    }


def _below(message: Message, path: str) -> dict[str, Value]:
    settings = {join(path, name): value for name, value in _scalars(message).items()}
    for child, place in children(message, path):
        settings |= _below(child, place)
    return settings


def _scalars(message: Message) -> dict[str, Value]:
    """Returns the scalar fields of one message, and the choices of its oneofs."""
    settings: dict[str, Value] = {}
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None or field.type == FieldDescriptor.TYPE_STRING:
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            settings |= {field.name: ", ".join(str(_show(field, item)) for item in value)} if value else {}
        elif message.HasField(field.name) or field.has_default_value:
            settings[field.name] = _show(field, value)
    for oneof in message.DESCRIPTOR.oneofs:
        chosen = message.WhichOneof(oneof.name)
        if chosen is None and message.DESCRIPTOR.is_extendable:
            chosen = next(
                (fields.name_of(field) for field, _ in message.ListFields() if field.is_extension), None
            )
        if chosen is not None:
            settings[oneof.name] = chosen
    return settings


def _show(field: FieldDescriptor, value: Value) -> Value:
    return field.enum_type.values_by_number[int(value)].name if field.enum_type is not None else value
