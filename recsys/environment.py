"""Describes this machine: versions of libraries, driver, compilers.

`recsys.install` reads the table of tested rows (so nothing here imports torch at the top), checkpoints
and packages record `versions()`, the exporter asks for `find_cxx()`, and `recsys.doctor` reports all of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import recsys
from recsys.errors import InstallationError


class Row(NamedTuple):
    """Versions of the three libraries that only work together."""

    torch: str
    fbgemm: str
    torchrec: str


TESTED = (
    Row(torch="2.11", fbgemm="1.6.0", torchrec="1.6.1"),
    Row(torch="2.12", fbgemm="1.7.0", torchrec="1.7.0"),
    Row(torch="2.13", fbgemm="1.8.0", torchrec="1.8.0"),
)

FOR_GPUS = TESTED[0]
"""The row that was run and timed on GPUs. Its torch includes Triton 3.6, whose Gluon the Hopper kernels use;
with the Triton of later ones they are not used."""

MINIMAL_PTXAS = (13, 3)
"""Earlier assemblers miscompile some products of Triton's on Hopper."""

PACKAGED_PTXAS = "nvidia-cuda-nvcc>=13.3"
"""A distribution with an assembler that is new enough."""

REPAIR = "type `python -m recsys.install`; `python -m recsys.doctor` says what is wrong"
"""Advice about an installation that does not work, for the end of a sentence."""

COMPILE_PROTOS = "python scripts/compile_protos.py"
"""The command to type if `protos_differ`."""

_BROKEN = (ImportError, OSError, RuntimeError, AttributeError)
"""Errors of importing a library of which a part is missing or was built for another version."""

_RECORDED = ("torch", "torchrec", "torchmetrics", "tensordict", "numpy", "pyarrow", "protobuf", "triton")

_WRONG_WARNINGS = (
    "cannot determine compatibility with PyTorch",
    "is_fx_tracing will return true for both fx.symbolic_trace and torch.export",
)

_WARNINGS_ON_CUDA = (
    r".*_get_pg_default_device",
    "Multiple backends are registered with this ProcessGroup",
    "TBE B200 optimization",
)
"""Regular expressions of warnings (their beginnings) that TorchRec 1.6 and FBGEMM 1.6 give on every GPU."""


def tested_row(torch_version: str) -> Row | None:
    """The row of the table for a torch version such as `2.13.0+cpu`, or None when it was never tested."""
    minor = ".".join(torch_version.split(".")[:2])
    return next((row for row in TESTED if row.torch == minor), None)


def versions() -> dict[str, str]:
    """Versions that can change a result: Python, this package and each installed library.

    `fbgemm-gpu` ends in `+cpu` when the build for machines without a GPU is installed.
    """
    by_package = {"recsys": recsys.__version__, "python": platform.python_version()}
    for name in _RECORDED:
        version = installed_version(name)
        if version is not None:
            by_package[name] = version
    cpu, cuda = installed_version("fbgemm-gpu-cpu"), installed_version("fbgemm-gpu")
    if cpu is not None:
        by_package["fbgemm-gpu"] = f"{cpu}+cpu"
    elif cuda is not None:
        by_package["fbgemm-gpu"] = cuda
    return by_package


def commit() -> str:
    """Returns the git commit of the clone that this package runs from, with a word if files differ from it.

    Empty for an installed package, and where git cannot tell.
    """
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def protos_differ(root: Path | None = None) -> bool:
    """True in a clone whose `protos/` changed after `recsys/protos` was compiled, for example by a pull.

    Then fields that the reference lists may not exist.

    Args:
        root: of the clone; the folder around this package by default.
    """
    from recsys import protos

    sources = sorted(((root or Path(recsys.__file__).parents[1]) / "protos").glob("*.proto"))
    compiled = getattr(protos, "SOURCES", None)
    return bool(sources) and compiled is not None and compiled != protos_fingerprint(sources)


def protos_fingerprint(sources: list[Path]) -> str:
    """Hex SHA-256 of the names and texts of `.proto` files."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None when `libnvidia-ml.so.1` does not load: there is no driver then.

    FBGEMM's CUDA build cannot be imported without one.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    nvml.nvmlInit_v2()
    status = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return text.value.decode() if status == 0 else f"unknown (NVML error {status})"


def find_cxx() -> str | None:
    """Path of the C++ compiler to export with: `$CXX` if set, else g++, else clang++; None if missing."""
    chosen = os.environ.get("CXX")
    candidates = (chosen,) if chosen else ("g++", "clang++")
    return next((path for name in candidates if (path := shutil.which(name))), None)


def prefer_packaged_ptxas() -> None:
    """Let Triton assemble with the ptxas of an installed nvidia-cuda-nvcc, unless the user named one.

    Triton 3.6 and 3.7 bring ptxas 12.8, which miscompiles some Hopper code. Takes effect for kernels that are
    compiled afterwards.
    """
    spec = importlib.util.find_spec("nvidia")
    if "TRITON_PTXAS_PATH" in os.environ or spec is None or spec.submodule_search_locations is None:
        return
    folders = map(Path, spec.submodule_search_locations)
    assemblers = [path for folder in folders for path in folder.glob("cu*/bin/ptxas")]
    best = max(assemblers, key=lambda path: version_numbers(tool_version(str(path))), default=None)
    if best is not None and version_numbers(tool_version(str(best))) >= MINIMAL_PTXAS:
        os.environ["TRITON_PTXAS_PATH"] = str(best)


def find_ptxas() -> str | None:
    """Path of Triton's assembler: `$TRITON_PTXAS_PATH`, else the one inside Triton, else one on PATH."""
    chosen = os.environ.get("TRITON_PTXAS_PATH")
    if chosen:
        return shutil.which(chosen)
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
        if bundled.exists():
            return str(bundled)
    return shutil.which("ptxas")


def newer_ptxas() -> str:
    """The command that installs an assembler fit for Hopper, if the present one is not."""
    install = f"pip install '{PACKAGED_PTXAS}'"
    # An assembler that the user named comes before any that is installed.
    return f"unset TRITON_PTXAS_PATH; {install}" if os.environ.get("TRITON_PTXAS_PATH") else install


def version_numbers(version: str) -> tuple[int, ...]:
    """`13.5` as (13, 5); empty for an unknown version."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def tool_version(path: str) -> str:
    """The version that a compiler or assembler prints, such as `13.5` or `12.2.0`; else empty."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    shown = done.stdout
    match = re.search(r"release (\d+\.\d+)", shown) or re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", shown)
    return match.group(1) if match else ""


def import_torchrec_quietly() -> ModuleType:
    """Import torchrec, which loads FBGEMM, without their needless log lines, which are filtered by text.

    - FBGEMM's own table of torch versions lacks releases that work (1.6.0 among them); it then warns that it
      cannot determine compatibility. `TESTED` is what counts.
    - FBGEMM logs through the root logger while it is imported, which would install a root handler for the
      whole process.
    - torch.fx warns about its own API at the first KeyedJaggedTensor that TorchRec makes.
    - DistributedDataParallel warns on every rank, see `quiet_torch`.
    - On CUDA, TorchRec asks torch for the device of a process group with two backends, through a deprecated
      function that also warns about the two; FBGEMM warns that this GPU is not of the next generation.

    Raises:
        InstallationError: it cannot be imported.
    """
    quiet_torch()
    for beginning in _WARNINGS_ON_CUDA:
        warnings.filterwarnings("ignore", message=beginning, category=UserWarning)
    try:
        with _quiet_root_logger():
            module = importlib.import_module("torchrec")
    except _BROKEN as error:
        raise InstallationError(f"torchrec cannot be imported ({error}): {REPAIR}") from error
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_is_worth_reading)
    return module


def quiet_torch() -> None:
    """Call before torch is imported, which reads the level of its C++ logs once.

    There, DistributedDataParallel warns on every rank about the time that its search for unused parameters
    takes; `training.distributed` needs that search for another reason. A setting of the user stays.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Run torch.export and AOTInductor without three messages about themselves that do not help users.

    torch's compiler of C++ extensions warns where a CUDA toolkit is installed and no GPU is; packages for the
    CPU do not need one.
    """
    needless = ("torch.export KJT to_dict", "No CUDA runtime is found, using CUDA_HOME")

    def wanted(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in needless)

    loggers = [logging.getLogger(name) for name in (None, "torch.utils.cpp_extension")]
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=r".isinstance\(treespec, LeafSpec\)", category=FutureWarning
            )
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(wanted)


@contextmanager
def _quiet_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    guard = None if root.handlers else logging.StreamHandler()
    root.addFilter(_is_worth_reading)
    if guard is not None:
        guard.setLevel(logging.WARNING)
        root.addHandler(guard)
    try:
        yield
    finally:
        root.removeFilter(_is_worth_reading)
        if guard is not None:
            root.removeHandler(guard)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _WRONG_WARNINGS)
