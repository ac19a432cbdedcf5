"""Turns a `.config` file into a resolved, checked `pb.Pipeline`: load, override, check, resolve, print.

Commands call `prepare`, which does `load`, `check` and `resolve` and puts all findings into one ConfigError.
The package stands below everything that reads a config; it builds no modules and does not import torch.
`recsys.config(...)` calls the library's function `recsys.api.config`.

    ready = config.prepare("configs/quickstart.config", ["train.num_steps=100"])
    ready.pipeline.model.max_seq_len
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recsys import protos as pb
from recsys.callable_module import make_callable
from recsys.config import checks, extensions, textproto
from recsys.config.resolver import Resolved, parity_tolerance, resolve
from recsys.errors import ConfigError

__all__ = [
    "FILE_NAME",
    "Loaded",
    "Parsed",
    "Ready",
    "Resolved",
    "check",
    "check_device",
    "check_libraries",
    "load",
    "parse",
    "prepare",
    "prepare_loaded",
    "read",
    "read_parsed",
    "resolve",
    "to_text",
    "warnings",
]


FILE_NAME = "config.resolved"
"""File name of the resolved config in a run folder and in a package."""


class Loaded(NamedTuple):
    """A config as written, neither resolved nor checked.

    Attributes:
        pipeline: the message.
        locations: `<file>:<line>` or the `--set` of each field, by a path such as `data.train.parquet.paths`.
    """

    pipeline: pb.Pipeline
    locations: dict[str, str]


class Parsed(NamedTuple):
    """The part of a config that could be read, and the mistakes in the rest."""

    loaded: Loaded
    mistakes: list[str]


class Ready(NamedTuple):
    """A resolved and checked config, ready to build from.

    Attributes:
        pipeline: the resolved and checked message.
        origins: the origin of each value that the file does not give, by field path.
        warnings: one line for each setting that is allowed but has no effect or a surprising one.
    """

    pipeline: pb.Pipeline
    origins: dict[str, str]
    warnings: list[str]


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    follow_imports: bool = True,
) -> pb.Pipeline:
    """Reads the config in a file and applies overrides such as `train.num_steps=100`, without resolving or
    checking it.

    Args:
        imports: modules to import first, because they extend the config language.
        follow_imports: also import the modules that the config lists. Use False for the config of a package,
            which may come from an untrusted source.

    Raises:
        ConfigError: lists every mistake in the file and the overrides.
    """
    return read(path, overrides, imports=imports, follow_imports=follow_imports).pipeline


def read(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    follow_imports: bool = True,
) -> Loaded:
    """Reads a config as `load` does, and also returns the location of every field."""
    loaded, mistakes = read_parsed(path, overrides, imports=imports, follow_imports=follow_imports)
    if mistakes:
        raise ConfigError(mistakes)
    return loaded


def prepare(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    read_files: bool = True,
    imports: Sequence[str] = (),
    follow_imports: bool = True,
) -> Ready:
    """Loads, checks and resolves a config.

    If an override gives a run another precision, its tolerance of exports follows, unless that was chosen.

    Args:
        read_files: also read the sizes of vocabularies from their files.
        imports, follow_imports: as in `load`.

    Raises:
        ConfigError: lists every finding. Mistakes in the text come first, then findings about the part that
            could be read, except those about missing fields, which the unreadable part may hold.
    """
    parsed = read_parsed(path, overrides, imports=imports, follow_imports=follow_imports)
    if Path(path).name == FILE_NAME and _follows_precision(path, overrides, imports, follow_imports):
        parsed.loaded.pipeline.export.ClearField("parity_tolerance")
    return prepare_loaded(*parsed, overrides, read_files=read_files)


def _follows_precision(
    path: str | Path, overrides: Sequence[str], imports: Sequence[str], follow_imports: bool
) -> bool:
    """Returns whether the tolerance in a resolved config is that of a precision that overrides replace."""
    changed = {override.partition("=")[0].strip() for override in overrides}
    if "model.precision" not in changed or "export.parity_tolerance" in changed:
        return False
    run = read_parsed(path, imports=imports, follow_imports=follow_imports).loaded.pipeline
    return run.export.parity_tolerance == parity_tolerance(run.model.precision)


def prepare_loaded(
    loaded: Loaded, mistakes: Sequence[str] = (), overrides: Sequence[str] = (), *, read_files: bool = True
) -> Ready:
    """Checks and resolves a config that was read with `parse`.

    Args:
        loaded: the config as written; it is not changed.
        mistakes: findings of `parse`.
        overrides: the overrides that `loaded` contains, for warnings about them.
        read_files: also read the sizes of vocabularies from their files.

    Raises:
        ConfigError: lists every finding, as in `prepare`.
    """
    resolved = resolve(loaded.pipeline, read_files=False)
    findings = checks.findings(resolved.pipeline, resolved.origins)
    if mistakes:
        certain = [
            finding for finding in findings if finding.path in loaded.locations and not finding.missing
        ]
        raise ConfigError([*mistakes, *checks.lines(certain, loaded.locations)])
    shown = checks.lines(findings, loaded.locations)
    try:
        resolved = resolve(loaded.pipeline, read_files=read_files, locations=loaded.locations)
    except ConfigError as error:
        shown += error.findings
    if shown:
        raise ConfigError(shown)
    shown = _replaced(overrides) + warnings(loaded.pipeline, loaded.locations)
    return Ready(resolved.pipeline, resolved.origins, shown)


def check(pipeline: pb.Pipeline, locations: dict[str, str] | None = None) -> list[str]:
    """Lists the faults of a config, one per line: `<file>:<line>: <field path>: <the fault, and what to do>`.

    Args:
        pipeline: resolved or not.
        locations: the locations that `read` returns; without them, findings start with the field path.
    """
    resolved = resolve(pipeline, read_files=False)
    return checks.lines(checks.findings(resolved.pipeline, resolved.origins), locations or {})


def check_device(pipeline: pb.Pipeline, device: str) -> None:
    """Refuses a resolved config that asks for something that a device, `cpu` or `cuda`, cannot do.

    Raises:
        ConfigError: lists every finding.
    """
    findings = checks.device_findings(pipeline, device)
    if findings:
        raise ConfigError(checks.lines(findings, {}))


def check_libraries(pipeline: pb.Pipeline, locations: dict[str, str] | None = None) -> None:
    """Refuses a config whose training needs a library that is not installed.

    Raises:
        ConfigError: lists every finding, in the form of `check`.
    """
    findings = checks.library_findings(pipeline)
    if findings:
        raise ConfigError(checks.lines(findings, locations or {}))


def warnings(pipeline: pb.Pipeline, locations: dict[str, str] | None = None) -> list[str]:
    """Lists settings that are allowed but have no effect or a surprising one, in the form of `check`."""
    return checks.lines(checks.warnings(pipeline), locations or {})


def to_text(pipeline: pb.Pipeline, origins: dict[str, str] | None = None) -> str:
    """Writes a config as text that `load` reads back as the same message, with origins as comments."""
    return textproto.write(pipeline, origins)


def read_parsed(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    follow_imports: bool = True,
) -> Parsed:
    """Reads the config in a file, and returns mistakes instead of raising them.

    Raises:
        ConfigError: the file cannot be read, or a module cannot be imported.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"not a text file in UTF-8 ({error.reason} at byte {error.start})"
        raise ConfigError(f"{path}: {problem}") from None
    except OSError as error:
        if isinstance(error, IsADirectoryError):
            names = sorted(entry.name for entry in file.glob("*.config"))
            hint = f", such as {names[0]}" if names else "; none is in it"
            raise ConfigError(f"{path}: is a folder; name a .config file{hint}") from None
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise ConfigError(f"{path}: {why}{_neighbours(file)}") from None
    return parse(text, str(path), overrides, imports=imports, follow_imports=follow_imports)


def parse(
    text: str,
    name: str,
    overrides: Sequence[str] = (),
    *,
    imports: Sequence[str] = (),
    follow_imports: bool = True,
) -> Parsed:
    """Reads the config in a text.

    Args:
        text: in protobuf text format.
        name: name of the text in findings, usually its file.
        overrides: assignments such as `train.num_steps=100`.
        imports, follow_imports: as in `load`.

    Raises:
        ConfigError: a module cannot be imported.
    """
    extensions.load(imports)
    loaded, mistakes = _parse(text, name, overrides)
    listed = [module for module in loaded.pipeline.imports if module not in extensions.loaded()]
    if listed and follow_imports:
        where = loaded.locations.get("imports", name)
        extensions.load(listed, f"{where}: imports:")
        loaded, mistakes = _parse(text, name, overrides)
    if any(extensions.UNKNOWN in mistake for mistake in mistakes) and extensions.discover():
        loaded, mistakes = _parse(text, name, overrides)
    for module in imports:
        if module not in loaded.pipeline.imports:
            loaded.locations[f"imports[{len(loaded.pipeline.imports)}]"] = "--import"
            loaded.pipeline.imports.append(module)
    if listed and mistakes and not follow_imports:
        flags = " ".join(f"--import {module}" for module in listed)
        mistakes.append(
            f"{name}: it was made with {flags}; give these flags again, since a package never imports code "
            "by itself"
        )
    return Parsed(loaded, mistakes)


def _parse(text: str, name: str, overrides: Sequence[str]) -> Parsed:
    """Parses a text and applies overrides."""
    pipeline = pb.Pipeline()
    parsed = textproto.parse(text, pipeline, name)
    locations = {"": name, **parsed.locations}
    mistakes = list(parsed.findings)
    for assignment in overrides:
        mistakes += textproto.override(pipeline, assignment, locations)
    return Parsed(Loaded(pipeline, locations), mistakes)


def _replaced(overrides: Sequence[str]) -> list[str]:
    """Warns about overrides that a later one replaces: a user may repeat a flag and expect a list to grow."""
    paths = [assignment.partition("=")[0].strip() for assignment in overrides]
    return [
        f"--set {assignment}: a later --set {path} replaces it; a list is given as a whole, {path}=['a', 'b']"
        for place, (assignment, path) in enumerate(zip(overrides, paths, strict=True))
        if path in paths[place + 1 :]
    ]


def _neighbours(file: Path) -> str:
    """Suggests .config files whose names resemble the name of a missing file."""
    folder = file.parent
    if file.exists() or not folder.is_dir():
        return ""
    names = sorted(p.name for p in folder.glob("*.config"))
    hint = textproto.did_you_mean(file.name, names).replace("Allowed here", "Configs there")
    return f". {hint}" if names else ""


make_callable(__name__)
