"""Write `configs/REFERENCE.md` from the comments in `protos/`: every setting with its type and default.

python scripts/config_reference.py            # write it
python scripts/config_reference.py --check    # exit 1 when a comment is missing or the file is stale
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from google.protobuf import descriptor_pb2 as pb2

from recsys import models  # noqa: F401  declares the families and mixers, and which fields they need
from recsys import protos as pb
from recsys.config.checks.values import REQUIRED

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "configs" / "REFERENCE.md"
PACKAGE = "recsys/protos"
COMMAND = "python scripts/config_reference.py"
FIRST = (
    "pipeline",
    "data",
    "feature",
    "model",
    "preprocessor",
    "mixer",
    "postprocessor",
    "head",
    "loss",
    "metric",
)

_TYPES = {
    pb2.FieldDescriptorProto.TYPE_DOUBLE: "number",
    pb2.FieldDescriptorProto.TYPE_INT32: "int32",
    pb2.FieldDescriptorProto.TYPE_INT64: "int64",
    pb2.FieldDescriptorProto.TYPE_BOOL: "bool",
    pb2.FieldDescriptorProto.TYPE_STRING: "string",
}
# Numbers of fields in descriptor.proto, which make up the path of a location.
_FILE_MESSAGE, _FILE_ENUM, _FILE_OPTION = 4, 5, 7
_MESSAGE_FIELD, _MESSAGE_ENUM = 2, 4
_ENUM_VALUE = 2


class Commented(NamedTuple):
    """A proto file and its comments by location path."""

    file: pb2.FileDescriptorProto
    comments: dict[tuple[int, ...], str]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write configs/REFERENCE.md from the comments in protos/.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if there is something to do"
    )
    check = parser.parse_args(argv).check
    sources = read_protos(ROOT / "protos")
    missing = without_comment(sources)
    for name in missing:
        print(f"protos: {name} has no comment in front of it", file=sys.stderr)
    text = reference(sources)
    stale = not REFERENCE.exists() or REFERENCE.read_text(encoding="utf-8") != text
    if stale and not check:
        REFERENCE.write_text(text, encoding="utf-8")
        print(REFERENCE.relative_to(ROOT))
    elif stale:
        print(f"{REFERENCE.relative_to(ROOT)} is stale; run: {COMMAND}", file=sys.stderr)
    return 1 if missing or (check and stale) else 0


def read_protos(folder: Path) -> list[Commented]:
    """Reads all proto files of a folder with their comments, the root first.

    Raises:
        ValueError: protoc rejects a file; its message is on stderr.
    """
    from grpc_tools import protoc  # in the `dev` extra only

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "descriptors.bin"
        include = [f"-I{PACKAGE}={folder}", f"-I{files('grpc_tools') / '_proto'}"]
        names = [f"{PACKAGE}/{path.name}" for path in sorted(folder.glob("*.proto"))]
        if (
            protoc.main(["protoc", *include, "--include_source_info", f"--descriptor_set_out={out}", *names])
            != 0
        ):
            raise ValueError(f"protoc refused a file of {folder}; its message is above")
        described = pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    order = {name: place for place, name in enumerate(FIRST)}
    ordered = sorted(described, key=lambda file: (order.get(Path(file.name).stem, len(FIRST)), file.name))
    return [Commented(file, _comments(file)) for file in ordered]


def _comments(file: pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    places = file.source_code_info.location
    return {
        tuple(place.path): " ".join(place.leading_comments.split())
        for place in places
        if place.leading_comments
    }


def without_comment(sources: list[Commented]) -> list[str]:
    """Returns full names of messages, fields, enums, enum values and options without a comment."""
    unexplained = []
    for file, comments in sources:
        for name, path in _elements(file):
            if path not in comments:
                unexplained.append(name)
    return unexplained


def _elements(file: pb2.FileDescriptorProto) -> list[tuple[str, tuple[int, ...]]]:
    elements = []
    for number, message in enumerate(file.message_type):
        place = (_FILE_MESSAGE, number)
        elements.append((message.name, place))
        for index, field in enumerate(message.field):
            elements.append((f"{message.name}.{field.name}", (*place, _MESSAGE_FIELD, index)))
        for index, enum in enumerate(message.enum_type):
            elements += _enum_elements(enum, f"{message.name}.{enum.name}", (*place, _MESSAGE_ENUM, index))
    for number, enum in enumerate(file.enum_type):
        elements += _enum_elements(enum, enum.name, (_FILE_ENUM, number))
    return elements + [(option.name, (_FILE_OPTION, n)) for n, option in enumerate(file.extension)]


def _enum_elements(
    enum: pb2.EnumDescriptorProto, name: str, path: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...]]]:
    values = [(f"{name}.{v.name}", (*path, _ENUM_VALUE, index)) for index, v in enumerate(enum.value)]
    return [(name, path), *values]


def reference(sources: list[Commented]) -> str:
    """Returns the whole page."""
    parts = [
        "# Every setting of a `.config`",
        f"Made by `{COMMAND}` from the comments in `protos/`; edit those. A `.config` is one "
        "[Pipeline](#pipeline) in protobuf text format; `recsys.train --config FILE --print-config` "
        "shows every setting of a config, and where those that it leaves open come from; "
        "`--set train.num_steps=100` overrides one. Of the fields of one *choice*, one is set.",
    ]
    for source in sources:
        if not source.file.message_type:
            continue  # the options that describe the schema are not settings
        parts.append(f"## {Path(source.file.name).stem}.proto")
        for number, message in enumerate(source.file.message_type):
            parts += _message(source, message, (_FILE_MESSAGE, number))
        for number, enum in enumerate(source.file.enum_type):
            parts += _enum(source, enum, enum.name, (_FILE_ENUM, number))
    return "\n\n".join(parts) + "\n"


def _message(source: Commented, message: pb2.DescriptorProto, path: tuple[int, ...]) -> list[str]:
    parts = [f"### {message.name}", source.comments.get(path, "")]
    if message.extension_range:
        parts.append(
            "Installed packages may add choices: `[package.name] { ... }`, see [docs/extending.md]"
            "(../docs/extending.md)."
        )
    rows = []
    needed = REQUIRED.get(getattr(pb, message.name), ())
    for index, field in enumerate(message.field):
        meaning = source.comments.get((*path, _MESSAGE_FIELD, index), "")
        if field.HasField("oneof_index"):
            meaning = f"*Choice of {message.oneof_decl[field.oneof_index].name}.* {meaning}"
        default = f"`{field.default_value}`" if field.HasField("default_value") else ""
        if field.name in needed:
            default = "needed"
        rows.append(f"| `{field.name}` | {_type(field)} | {default} | {_cell(meaning)} |")
    if rows:
        parts.append("\n".join(["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows]))
    for index, enum in enumerate(message.enum_type):
        parts += _enum(source, enum, f"{message.name}.{enum.name}", (*path, _MESSAGE_ENUM, index))
    return parts


def _enum(source: Commented, enum: pb2.EnumDescriptorProto, name: str, path: tuple[int, ...]) -> list[str]:
    rows = [
        f"| `{value.name}` | {_cell(source.comments.get((*path, _ENUM_VALUE, index), ''))} |"
        for index, value in enumerate(enum.value)
        if value.number != 0
    ]
    table = "\n".join(["| value | meaning |", "| --- | --- |", *rows])
    return [f"### {name}", source.comments.get(path, ""), table]


def _type(field: pb2.FieldDescriptorProto) -> str:
    if field.type_name:
        name = field.type_name.removeprefix(".recsys.")
        shown = f"[{name}](#{name.lower().replace('.', '')})"
    else:
        shown = _TYPES[field.type]
    return f"list of {shown}" if field.label == pb2.FieldDescriptorProto.LABEL_REPEATED else shown


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
