"""Describes this machine: versions of libraries, driver, compilers.

`recsys.install` reads the table of tested versions (so this module does not import torch at the top),
checkpoints and packages record `versions()`, the exporter calls `find_cxx()`, and `recsys.doctor` reports all
of it.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
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
    """Versions of three libraries that only work together."""

    torch: str
    fbgemm: str
    torchrec: str


TESTED = (
    Row(torch="2.11", fbgemm="1.6.0", torchrec="1.6.1"),
    Row(torch="2.12", fbgemm="1.7.0", torchrec="1.7.0"),
    Row(torch="2.13", fbgemm="1.8.0", torchrec="1.8.0"),
)

FOR_GPUS = TESTED[0]
"""The row that was run and timed on GPUs. Its torch includes Triton 3.6, whose Gluon the Hopper kernels need;
with the Triton of later rows these kernels are not used."""

MINIMAL_PTXAS = (13, 3)
"""Oldest ptxas to use on Hopper; older ones miscompile some of Triton's matrix products there."""

PACKAGED_PTXAS = "nvidia-cuda-nvcc>=13.3"
"""Distribution with a ptxas that is new enough."""

REPAIR = "type `python -m recsys.install`; `python -m recsys.doctor` says what is wrong"
"""Advice about a broken installation, as the end of a sentence."""

COMPILE_PROTOS = "python scripts/compile_protos.py"
"""Command to type if `protos_differ()` returns True."""

_BROKEN = (ImportError, OSError, RuntimeError, AttributeError)
"""Errors that importing a library raises if a part of it is missing or was built for another version."""

_RECORDED = ("torch", "torchrec", "torchmetrics", "tensordict", "numpy", "pyarrow", "protobuf", "triton")

_WRONG_WARNINGS = (
    "cannot determine compatibility with PyTorch",
    "is_fx_tracing will return true for both fx.symbolic_trace and torch.export",
)

_NEEDLESS_WARNINGS = (
    r".*_get_pg_default_device",
    "Multiple backends are registered with this ProcessGroup",
    "TBE B200 optimization",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    "torch.distributed is disabled, unavailable or uninitialized",
)
"""Regular expressions for the beginnings of needless warnings: of TorchRec 1.6 and FBGEMM 1.6 on every GPU,
and of torch about checkpoints of sharded tables or of one process."""


def tested_row(torch_version: str) -> Row | None:
    """Returns the row of `TESTED` for a torch version such as `2.13.0+cpu`, or None if it has none."""
    minor = ".".join(torch_version.split(".")[:2])
    return next((row for row in TESTED if row.torch == minor), None)


def versions() -> dict[str, str]:
    """Returns the versions that can change a result: Python, this package and each installed library.

    The version of `fbgemm-gpu` ends in `+cpu` if the build for machines without a GPU is installed.
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
    """Returns the git commit of the clone that this package runs from, with " with changes" if files differ.

    The text is empty for an installed package, or if git cannot find the commit.
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
    """Returns whether `protos/` of the clone changed after `recsys/protos` was compiled, e.g. by a pull.

    If it did, fields that the config reference lists may not exist.

    Args:
        root: root of the clone; the folder around this package by default.
    """
    from recsys import protos

    sources = sorted(((root or Path(recsys.__file__).parents[1]) / "protos").glob("*.proto"))
    compiled = getattr(protos, "SOURCES", None)
    return bool(sources) and compiled is not None and compiled != protos_fingerprint(sources)


def protos_fingerprint(sources: list[Path]) -> str:
    """Returns the SHA-256 of the names and texts of `.proto` files, in hex."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, or None if there is no driver.

    Without a driver, `libnvidia-ml.so.1` does not load, and FBGEMM's CUDA build cannot be imported.
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
    """Returns the path of the C++ compiler for exports: `$CXX` if set, else g++, else clang++, else None."""
    chosen = os.environ.get("CXX")
    candidates = (chosen,) if chosen else ("g++", "clang++")
    return next((path for name in candidates if (path := shutil.which(name))), None)


def prefer_packaged_ptxas() -> None:
    """Makes Triton use the ptxas of an installed nvidia-cuda-nvcc, unless the user named a ptxas.

    Triton 3.6 and 3.7 include ptxas 12.8, which miscompiles some Hopper code. The call affects kernels that
    are compiled after it.
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
    """Returns the path of Triton's ptxas: `$TRITON_PTXAS_PATH`, else the one in Triton, else the one on
    PATH."""
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
    """Returns the command that installs a ptxas that works on Hopper."""
    install = f"pip install '{PACKAGED_PTXAS}'"
    # A ptxas that the user named takes precedence over an installed one.
    return f"unset TRITON_PTXAS_PATH; {install}" if os.environ.get("TRITON_PTXAS_PATH") else install


def version_numbers(version: str) -> tuple[int, ...]:
    """Parses a version such as `13.5` to (13, 5); empty for an unknown version."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def tool_version(path: str) -> str:
    """Returns the version that a compiler or assembler prints, such as `13.5` or `12.2.0`, or ""."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    shown = done.stdout
    match = re.search(r"release (\d+\.\d+)", shown) or re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", shown)
    return match.group(1) if match else ""


def import_torchrec_quietly() -> ModuleType:
    """Imports torchrec, which loads FBGEMM, and filters these needless log lines by their text:

    - FBGEMM's table of torch versions lacks releases that work (1.6.0 among them), and FBGEMM then warns that
      it cannot determine compatibility. `TESTED` decides instead.
    - FBGEMM logs through the root logger while it is imported, which would install a root handler for the
      whole process.
    - torch.fx warns about its own API at the first KeyedJaggedTensor that TorchRec makes.
    - DistributedDataParallel warns on every rank, see `quiet_torch`.
    - On CUDA, TorchRec asks torch for the device of a process group with two backends, through a deprecated
      function that also warns about the two backends; FBGEMM warns that this GPU is not of the next
      generation.
    - torch deprecates ShardedTensor, which TorchRec uses, and warns that a checkpoint has a single process.

    Raises:
        InstallationError: torchrec cannot be imported.
    """
    quiet_torch()
    for beginning in _NEEDLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=beginning)
    try:
        with _quiet_root_logger(), _without_collections():
            module = importlib.import_module("torchrec")
    except _BROKEN as error:
        raise InstallationError(f"torchrec cannot be imported ({error}): {REPAIR}") from error
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_is_worth_reading)
    return module


def quiet_torch() -> None:
    """Lowers the level of torch's C++ logs. Call it before torch is imported: it reads the level once.

    In these logs, DistributedDataParallel warns on every rank about the time that its search for unused
    parameters takes; `training.distributed` needs that search for another reason. A setting of the user is
    not changed.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silences three messages of torch.export and AOTInductor that do not help users, during the block.

    One of them is about a CUDA toolkit on a machine without a GPU, which packages for the CPU do not need.
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


@contextmanager
def _without_collections() -> Iterator[None]:
    """Stops the garbage collector during the block, which makes objects that stay: a sixth of the CPU time of
    importing torchrec is spent on looking at them again and again."""
    if "torchrec" in sys.modules or not gc.isenabled():
        yield  # nothing is left to import, or nothing collects
        return
    gc.disable()
    try:
        yield
    finally:
        leaves_out = gc.get_freeze_count() > 0
        gc.freeze()
        if not leaves_out:
            gc.unfreeze()  # both calls move all objects to the oldest generation and look at none
        gc.enable()


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _WRONG_WARNINGS)
