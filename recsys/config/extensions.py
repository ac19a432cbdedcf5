"""Imports the packages that extend the config language with messages of their own.

Importing such a package registers its messages with protobuf and its classes with `config.registry`. A
command imports the modules of `--import` and those that the config of a run lists in `imports`. The entry
points of installed packages in the group `recsys.components` are imported only when a config names an
extension that is not known yet. The config of an exported package never causes an import.
"""

import copyreg
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata

from google.protobuf.message import Message

from recsys import protos as pb
from recsys.config import fields, registry
from recsys.errors import ConfigError

GROUP = "recsys.components"
"""Entry-point group in which an installed package is found without `--import`."""

HOLDERS = [
    pb.Feature,
    pb.Model,
    pb.Preprocessor,
    pb.Mixer,
    pb.Postprocessor,
    pb.Head,
    pb.Loss,
    pb.Metric,
    pb.Source,
    pb.Hook,
    pb.DenseOptimizer,
    pb.SparseOptimizer,
    pb.Schedule,
]
"""Messages that packages may extend."""

UNKNOWN = "no such extension is registered"
"""Beginning of the finding about an extension that no imported package declares."""

_POOL = "descriptor pool"
"""Text in protobuf's error about a file whose names or numbers are already taken."""

_LOADED: list[str] = []
_BROKEN: dict[str, str] = {}
"""The error of each entry point that cannot be imported, by module."""


def load(modules: Iterable[str], where: str = "--import") -> None:
    """Imports modules that extend the config language, installed or in the current folder.

    Args:
        modules: names such as `acme` or `acme.mixers`.
        where: the flag or the line of a config that names them, for errors.

    Raises:
        ConfigError: a module cannot be imported, or declares extensions that a config cannot hold.
    """
    for module in modules:
        if module in _LOADED:
            continue
        if os.getcwd() not in sys.path and "" not in sys.path:
            # Unlike `python -m`, the console command `recsys` does not search the current folder.
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except Exception as error:  # code of the user's, which may raise anything when it is imported
            raise ConfigError(f"{where} {module}: {_why(error, module)}") from error
        _require_messages(f"{where} {module}")
        _LOADED.append(module)


def discover() -> bool:
    """Imports the entry points of installed packages, and returns whether there were any to import.

    `unknown` names the entry points that cannot be imported.
    """
    before = len(_LOADED) + len(_BROKEN)
    for entry in metadata.entry_points(group=GROUP):
        if entry.module not in _BROKEN:
            try:
                load([entry.module], f"entry point {entry.name} of {GROUP}: import")
            except ConfigError as error:
                if _POOL in str(error):
                    raise  # protobuf keeps traces of the rejected file: do not use it any further
                _BROKEN[entry.module] = str(error)
    return len(_LOADED) + len(_BROKEN) > before


def loaded() -> tuple[str, ...]:
    """Returns the names of the modules that were imported, in order."""
    return tuple(_LOADED)


def unknown(message: Message, name: str) -> str:
    """Describes why `message` does not have the extension `name` of a config, and what to do about it."""
    if not message.DESCRIPTOR.is_extendable:
        names = ", ".join(field.name for field in message.DESCRIPTOR.fields)
        return f"{message.DESCRIPTOR.name} takes no extensions. Allowed here: {names or 'nothing'}."
    for holder in HOLDERS:
        if fields.find(holder, name) is not None:
            return f"extends {holder.DESCRIPTOR.name}, so it cannot be used in {message.DESCRIPTOR.name}"
    candidates = [fields.name_of(field) for field in fields.extensions(message)]
    if near := difflib.get_close_matches(name, candidates, n=1):
        return f"{UNKNOWN}. Did you mean {near[0]}?"
    faults = "".join(f" ({fault})" for fault in _BROKEN.values())
    return f"{UNKNOWN}; give --import with the package that declares it{faults}"


def _why(error: Exception, module: str) -> str:
    text = f"cannot be imported: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"{text}. Install it, or add the folder that holds it to PYTHONPATH"
    if _POOL in str(error):
        return (
            f"{text}. Its .proto uses a name or number that is already taken: choose another package or "
            "extension field number, and compile it again with python -m recsys.compile_protos"
        )
    return text


def _require_messages(where: str) -> None:
    """Refuses extensions that are not a single message, because a choice always holds one message."""
    for holder in HOLDERS:
        for field in fields.extensions(holder):
            if field.message_type is None or field.is_repeated:
                raise ConfigError(
                    f"{where}: {field.file.name}: the extension {field.full_name} of "
                    f"{holder.DESCRIPTOR.name} must be a message, and not repeated"
                )


def modules_of(message: Message) -> list[str]:
    """Returns the modules that another process must import before it can read and use `message`.

    These are the modules of the extensions in it, and of the classes that are registered for them.
    """
    modules: dict[str, None] = {}
    for field, value in message.ListFields():
        if field.is_extension:
            modules |= dict.fromkeys([type(value).__module__, *registry.modules_of(type(value))])
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                modules |= dict.fromkeys(modules_of(inner))
    return list(modules)


def _unpickle(modules: Sequence[str], content: bytes) -> pb.Pipeline:
    load(modules, "reader process: import")
    return pb.Pipeline.FromString(content)


def _pickle(pipeline: pb.Pipeline) -> tuple:
    return _unpickle, (modules_of(pipeline), pipeline.SerializeToString())


# A reader process knows no extensions when it receives its config, and would drop them.
copyreg.pickle(pb.Pipeline, _pickle)
