"""`python -m recsys.compile_protos`: compiles the `.proto` files of a package that extends recsys.

A package declares the messages of its components in `.proto` files of its own, which may import those of
recsys, e.g. `import "recsys/protos/mixer.proto";`. The compiler writes the module `x_pb2.py` and, for editors
and type checkers, `x_pb2.pyi` beside each `x.proto`.
"""

import sys
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from recsys import resources
from recsys.errors import ConfigError, InstallationError, RecsysError
from recsys.flags import Parser

COMPILER = "grpcio-tools==1.76.0"
"""Distribution with a protoc whose output works with every version of protobuf that recsys allows."""


def compile_protos(paths: Sequence[Path]) -> list[str]:
    """Compiles `.proto` files, given by path or by folder; returns a line about each module that it wrote.

    A module belongs to the Python package of its folder: Python imports it from the nearest folder above
    `x.proto` that has no `__init__.py`.

    Raises:
        ConfigError: there are no such files, protoc refuses a file (its message is on stderr), or a file
            declares names that could collide with names of recsys.
        InstallationError: the compiler is not installed.
    """
    by_root: dict[Path, list[Path]] = {}
    for source in _sources(paths):
        by_root.setdefault(_import_root(source.parent), []).append(source)
    return [line for root, sources in by_root.items() for line in _compile(root, sources)]


def _sources(paths: Sequence[Path]) -> list[Path]:
    sources: dict[Path, None] = {}
    for path in paths:
        inside = sorted(path.rglob("*.proto")) if path.is_dir() else [path]
        if not inside or not inside[0].is_file():
            raise ConfigError(f"{path}: no .proto file" + (" in this folder" if path.is_dir() else ""))
        sources |= dict.fromkeys(source.resolve() for source in inside)
    return list(sources)


def _import_root(folder: Path) -> Path:
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _compile(root: Path, sources: list[Path]) -> list[str]:
    try:
        from grpc_tools import protoc
    except ImportError as error:
        raise InstallationError(f"{error}: the compiler is missing; type `pip install {COMPILER}`") from error
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    names = [source.relative_to(root).as_posix() for source in sources]
    with tempfile.TemporaryDirectory() as scratch:
        descriptors = Path(scratch) / "descriptors.bin"
        include = [
            f"-Irecsys/protos={resources.PROTOS}",
            f"-I{root}",
            f"-I{files('grpc_tools') / '_proto'}",
        ]
        for outputs in (
            [f"--descriptor_set_out={descriptors}"],
            [f"--python_out={root}", f"--pyi_out={root}"],
        ):
            if protoc.main(["protoc", *include, *outputs, *names]) != 0:
                raise ConfigError(f"protoc refused a file of {root}; its message is above")
            compiled = FileDescriptorSet.FromString(descriptors.read_bytes()).file
            for file in compiled:
                _check(file)
    return [_about(root / file.name, file) for file in compiled]


def _check(file) -> None:
    """Raises ConfigError for a file whose names could collide with names of recsys or of another package."""
    if not file.package or file.package.split(".")[0] == "recsys":
        given = f"package {file.package}" if file.package else "no package"
        raise ConfigError(f"{file.name}: {given}; name one of your own, such as `package acme;`")


def _about(source: Path, file) -> str:
    module = source.with_name(f"{source.stem}_pb2.py")
    shown = [
        f"{extension.extendee.rpartition('.')[2]} {{ [{file.package}.{extension.name}] {{}} }}"
        for extension in file.extension
    ]
    return f"{module}: {', '.join(shown)}" if shown else str(module)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = Parser(
        "python -m recsys.compile_protos",
        description="Compile the .proto files of a package that extends recsys.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help=".proto files, or folders of them"
    )
    try:
        print("\n".join(compile_protos(parser.parse_args(arguments).paths)))
    except RecsysError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
