"""Maps a protobuf message to the class that it configures, and to what that class declares beforehand.

A component registers itself under its message (`@register(pb.FusionHead)`), and the holder of the message
around it (`pb.Head`, one oneof over all heads) picks the class with `pick`. The class bears the name of its
message and takes the message as its only positional argument.

A family of models or a mixer also has a declaration (`@declare(...)`, see `config.declarations`), which is
found under the same message without importing torch.
"""

import importlib
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from recsys.config import fields

DECLARATIONS = "recsys.models"
"""Package whose import registers the declarations of every family and mixer; it does not import torch."""

COMPONENTS = "recsys.models.components"
"""Module whose import registers the classes of every family and of all parts of models. Both are imported by
name when the registry is first asked for something that it does not know, because they stand above it."""

_CLASSES: dict[str, type] = {}
_DECLARATIONS: dict[str, type] = {}

Class = TypeVar("Class", bound=type)


class Component(NamedTuple):
    """A registered class and the message to construct it with."""

    cls: Any
    config: Any


def register(message: type[Message]):
    """Class decorator: `message` configures the decorated class.

    Raises:
        ValueError: two classes for one message, or a class whose name is not the message's.
    """
    key = message.DESCRIPTOR.full_name

    def wrap(cls: Class) -> Class:
        if cls.__name__ != message.DESCRIPTOR.name:
            raise ValueError(f"{cls.__name__} is registered for {key}: the class bears its message's name")
        known = _CLASSES.get(key)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{key} is registered twice: {known.__module__} and {cls.__module__}")
        _CLASSES[key] = cls
        return cls

    return wrap


def declare(message: type[Message]):
    """Class decorator: the decorated class declares what is known of `message` before anything is built.

    Raises:
        ValueError: two declarations for one message.
    """
    key = message.DESCRIPTOR.full_name

    def wrap(cls: Class) -> Class:
        known = _DECLARATIONS.get(key)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"{key} is declared twice: {known.__module__} and {cls.__module__}")
        _DECLARATIONS[key] = cls
        return cls

    return wrap


def declaration(message: type[Message]) -> type | None:
    """The class that declares a message type; None if nothing does."""
    key = message.DESCRIPTOR.full_name
    for module in (DECLARATIONS, COMPONENTS):
        if key not in _DECLARATIONS:
            importlib.import_module(module)
    return _DECLARATIONS.get(key)


def pick(choice: Message) -> Component:
    """The class and message of what is set in a holder of one choice, such as `pb.Mixer`.

    Raises:
        ValueError: nothing is set, or no class is registered for what is set.
    """
    field = fields.chosen(choice)
    if field is None:
        allowed = ", ".join(map(fields.name_of, fields.alternatives(choice)))
        raise ValueError(f"{choice.DESCRIPTOR.name}: nothing is set; choose one of {allowed}")
    config = fields.value_of(choice, field)
    return Component(lookup(type(config)), config)


def lookup(message: type[Message]) -> type:
    """The class registered for a message type.

    Raises:
        ValueError: no class is registered.
    """
    key = message.DESCRIPTOR.full_name
    if key not in _CLASSES:
        importlib.import_module(COMPONENTS)
    if key not in _CLASSES:
        raise ValueError(f"no class is registered for {key}; known: {', '.join(sorted(_CLASSES)) or 'none'}")
    return _CLASSES[key]


def registered(choice: type[Message]) -> dict[str, Component]:
    """Every alternative of a holder with its class and a message of defaults; tests loop over it."""
    found = {}
    for field in fields.alternatives(choice):
        message = fields.type_of(field)
        found[fields.name_of(field)] = Component(lookup(message), message())
    return found


def modules_of(message: type[Message]) -> list[str]:
    """Lists the modules of the classes that are registered for a message, as far as they can be imported."""
    key = message.DESCRIPTOR.full_name
    modules = [classes[key].__module__ for classes in (_CLASSES, _DECLARATIONS) if key in classes]
    return [module for module in modules if module != "__main__"]


def has_class(message: type[Message]) -> bool:
    """Returns whether a class is registered for a message of another package, which is imported already."""
    return message.DESCRIPTOR.full_name in _CLASSES
