"""Compile `protos/*.proto` into the Python package `recsys.protos`.

`pip install -e .` does this through `scripts/build_backend.py`; run it by hand only after editing a `.proto`:

    python scripts/compile_protos.py

The files of `protos/` are mapped to the virtual folder `recsys/protos/`, so they import each other as
`import "recsys/protos/feature.proto";` and the generated Python imports resolve inside the package. Beside
each `x_pb2.py` comes an `x_pb2.pyi` for editors and type checkers, and `__init__.py` re-exports every
message, enum and option:

    from recsys import protos as pb
    pb.HstuMixer(num_heads=4)

The `.proto` files are copied beside them, for packages that extend the language: protoc finds them with
`-I` and the folder that holds `recsys/`. `SOURCES` says which protos the package was made from;
`recsys.environment.protos_differ` compares.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "recsys/protos"


def compile_protos(root: Path = ROOT) -> list[Path]:
    """Generate `root/recsys/protos` from `root/protos`; return the files that changed.

    Files are written only when their text changed, each by a rename, so that a process that imports the
    package meanwhile never reads half a file. Modules whose `.proto` is gone are deleted.

    Raises:
        FileNotFoundError: `root/protos` has no `.proto` file.
        SystemExit: protoc found a fault; its message (file:line:column) is on stderr.
    """
    sources = sorted((root / "protos").glob("*.proto"))
    if not sources:
        raise FileNotFoundError(f"{root / 'protos'}: no .proto files to compile")
    with tempfile.TemporaryDirectory() as scratch:
        _run_protoc(root, sources, Path(scratch))
        generated = Path(scratch) / PACKAGE
        descriptors = (Path(scratch) / "descriptors.bin").read_bytes()
        text = _init_text(descriptors) + f'\nSOURCES = "{_fingerprint(sources)}"\n'
        (generated / "__init__.py").write_text(text, encoding="utf-8")
        for source in sources:
            shutil.copyfile(source, generated / source.name)
        return _publish(generated, root / PACKAGE)


def _fingerprint(sources: list[Path]) -> str:
    """As `recsys.environment.protos_fingerprint`, which a build cannot import."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _run_protoc(root: Path, sources: list[Path], out: Path) -> None:
    from grpc_tools import protoc  # present at build time and in the `dev` extra, not at run time

    status = protoc.main(
        [
            "protoc",
            f"-I{PACKAGE}={root / 'protos'}",
            f"-I{files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--descriptor_set_out={out / 'descriptors.bin'}",
            *(f"{PACKAGE}/{source.name}" for source in sources),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed on {root / 'protos'} (exit {status}); its message is above")


def _init_text(descriptors: bytes) -> str:
    """The `__init__.py` that re-exports each file's top-level messages, enums, enum values and options."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    imports, exported = "", []
    for file in FileDescriptorSet.FromString(descriptors).file:
        names = [message.name for message in file.message_type]
        for enum in file.enum_type:
            names += [enum.name, *(value.name for value in enum.value)]
        names += [option.name for option in file.extension]
        if names:
            lines = "".join(f"    {name},\n" for name in names)
            imports += f"from recsys.protos.{Path(file.name).stem}_pb2 import (\n{lines})\n"
            exported += names
    lines = "".join(f'    "{name}",\n' for name in exported)
    header = '"""The config language. Generated from protos/ by scripts/compile_protos.py."""\n\n'
    return f"{header}{imports}\n__all__ = [\n{lines}]\n"


def _publish(generated: Path, target: Path) -> list[Path]:
    target.mkdir(parents=True, exist_ok=True)
    fresh = {path.name: path.read_bytes() for path in sorted(generated.iterdir())}
    changed = []
    for name, content in fresh.items():
        destination = target / name
        if not destination.exists() or destination.read_bytes() != content:
            aside = target / f".{name}.new"
            aside.write_bytes(content)
            aside.replace(destination)
            changed.append(destination)
    for stale in (*target.glob("*_pb2.py*"), *target.glob("*.proto")):
        if stale.name not in fresh:
            stale.unlink()
            changed.append(stale)
    return changed


if __name__ == "__main__":
    try:
        for path in compile_protos():
            print(path.relative_to(ROOT))
    except ImportError as error:
        sys.exit(f"{error}. Install the compiler with: pip install grpcio-tools==1.76.0")
