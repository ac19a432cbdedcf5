"""Maps a protobuf message to the class that it configures, and to the declaration of that class.

A component registers itself under its message (`@register(pb.FusionHead)`), and the holder of the message
around it (`pb.Head`, one oneof over all heads) picks the class with `pick`. The class has the name of its
message and takes the message as its only positional argument.

A family of models or a mixer also has a declaration (`@declare(...)`, see `config.declarations`), which is
found under the same message without importing torch.
"""

import importlib
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from recsys.config import fields

DECLARATIONS = "recsys.models"
"""Package whose import registers the declarations of every family and mixer, without importing torch."""

COMPONENTS = "recsys.models.components"
"""Module whose import registers the classes of every family and of all parts of models. `DECLARATIONS` and
`COMPONENTS` stand above the registry, so it imports them by name, when it is first asked for something that
it does not know."""

FEATURE_KINDS = "recsys.data.features"
"""Package whose import registers the built-in kinds of features, without importing torch."""

_CLASSES: dict[str, type] = {}
_DECLARATIONS: dict[str, type] = {}

Class = TypeVar("Class", bound=type)


class Component(NamedTuple):
    """A registered class and the message to construct it with."""

    cls: Any
    config: Any


def register(message: type[Message]):
    """Returns a class decorator that registers the decorated class as the one that `message` configures.

    Raises:
        ValueError: the message already has a class, or the class has another name than the message.
    """
    key = message.DESCRIPTOR.full_name

    def wrap(cls: Class) -> Class:
        if cls.__name__ != message.DESCRIPTOR.name:
            raise ValueError(f"{cls.__name__} is registered for {key}: the class bears its message's name")
        registered = _CLASSES.get(key)
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ValueError(f"{key} is registered twice: {registered.__module__} and {cls.__module__}")
        _CLASSES[key] = cls
        return cls

    return wrap


def declare(message: type[Message]):
    """Returns a class decorator that registers the decorated class as the declaration of `message`, the facts
    that are known before anything is built.

    Raises:
        ValueError: the message already has a declaration.
    """
    key = message.DESCRIPTOR.full_name

    def wrap(cls: Class) -> Class:
        declared = _DECLARATIONS.get(key)
        if declared is not None and (declared.__module__, declared.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ValueError(f"{key} is declared twice: {declared.__module__} and {cls.__module__}")
        _DECLARATIONS[key] = cls
        return cls

    return wrap


def declaration(message: type[Message]) -> type | None:
    """Returns the declaration of a message type, or None if it has none."""
    key = message.DESCRIPTOR.full_name
    for module in (DECLARATIONS, COMPONENTS):
        if key not in _DECLARATIONS:
            importlib.import_module(module)
    return _DECLARATIONS.get(key)


def pick(choice: Message) -> Component:
    """Returns the class and the message of the alternative that is set in a holder such as `pb.Mixer`.

    Raises:
        ValueError: no alternative is set, or it has no registered class.
    """
    field = fields.chosen(choice)
    if field is None:
        allowed = ", ".join(map(fields.name_of, fields.alternatives(choice)))
        raise ValueError(f"{choice.DESCRIPTOR.name}: nothing is set; choose one of {allowed}")
    config = fields.value_of(choice, field)
    return Component(lookup(type(config)), config)


def lookup(message: type[Message]) -> type:
    """Returns the class that is registered for a message type.

    Raises:
        ValueError: no class is registered.
    """
    key = message.DESCRIPTOR.full_name
    if key not in _CLASSES:
        importlib.import_module(COMPONENTS)
    if key not in _CLASSES:
        raise ValueError(f"no class is registered for {key}; known: {', '.join(sorted(_CLASSES)) or 'none'}")
    return _CLASSES[key]


def feature_kind(message: type[Message]) -> type | None:
    """Returns the class of a kind of feature, or None if none is registered; imports no torch."""
    key = message.DESCRIPTOR.full_name
    if key not in _CLASSES:
        importlib.import_module(FEATURE_KINDS)
    return _CLASSES.get(key)


def registered(choice: type[Message]) -> dict[str, Component]:
    """Returns every alternative of a holder, with its class and a message of defaults; tests loop over it."""
    components = {}
    for field in fields.alternatives(choice):
        message = fields.type_of(field)
        components[fields.name_of(field)] = Component(lookup(message), message())
    return components


def modules_of(message: type[Message]) -> list[str]:
    """Lists the modules of the classes that are registered for a message, if they can be imported."""
    key = message.DESCRIPTOR.full_name
    modules = [classes[key].__module__ for classes in (_CLASSES, _DECLARATIONS) if key in classes]
    return [module for module in modules if module != "__main__"]


def has_class(message: type[Message]) -> bool:
    """Returns whether a class is registered for a message of another package that is already imported."""
    return message.DESCRIPTOR.full_name in _CLASSES
