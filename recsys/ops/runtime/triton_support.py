"""Shared by all Triton backends: whether they can run here, imports of kernels, checks of the assembler.

This module itself needs no Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch

from recsys import environment

logger = logging.getLogger(__name__)

GLUON = "3.6"
"""The version of Triton whose Gluon the Hopper kernels are written in."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Triton decides at import, by its own environment variable, whether kernels are compiled or interpreted.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_INSTALLED = importlib.util.find_spec("triton") is not None

_MODULES: dict[str, ModuleType] = {}
"""Imported modules of kernels by name; needed because a traced call cannot import any."""


class Support(NamedTuple):
    """A backend's answer. `reason` says what is missing and what would help; it is empty when `ok`.

    `auto=False`: the machine does not suit the backend, so "auto" skips it silently, even if it is `ok` (as
    for a kernel that runs on a CPU in an interpreter, for its tests).
    """

    ok: bool
    reason: str = ""
    auto: bool = True


SUPPORTED = Support(True)


def support(device: str, dtype: torch.dtype) -> Support:
    """Supports CUDA tensors of 16 or 32 bits. A CPU only interprets the kernels, for tests."""
    if device == "cpu":
        if not _INTERPRETED:
            return Support(False, "it needs CUDA tensors, these are on the CPU", auto=False)
    elif device != "cuda":
        return Support(False, f"it needs CUDA tensors, these are on {device}", auto=False)
    if not _INSTALLED:
        return Support(False, "Triton is not installed; type: pip install triton")
    if dtype not in DTYPES:
        return Support(False, f"it takes bfloat16, float16 and float32, not {dtype}")
    return Support(True, auto=device == "cuda")  # the interpreter runs only when named


def hopper_support(device: str, dtype: torch.dtype) -> Support:
    """Supports what `support` does, on a Hopper GPU and with the Triton that has the Gluon of the kernels."""
    able = support(device, dtype)
    if not able.ok or device != "cuda":
        return able._replace(ok=False, reason=able.reason or "it needs CUDA tensors", auto=False)
    missing = missing_for_hopper()
    return able._replace(ok=False, reason=missing) if missing else able


def has_kernels(device: torch.device) -> bool:
    """Returns True if code without a choice of backends should run kernels on this device now."""
    return device.type == "cuda" and _INSTALLED and not torch.compiler.is_compiling()


def preload(module: str) -> None:
    """Imports a module of kernels where they can run, because a traced call could not import it."""
    if _INSTALLED and torch.version.cuda is not None:
        environment.prefer_packaged_ptxas()
        _MODULES[module] = importlib.import_module(module)


def preload_gluon(module: str) -> None:
    """Does what `preload` does, for a module of Gluon kernels."""
    if (environment.installed_version("triton") or "").startswith(f"{GLUON}."):
        preload(module)


def load(module: str) -> ModuleType:
    """Returns a module of kernels, imported if necessary."""
    if not torch.compiler.is_compiling():
        _warn_about_assembler()
    if module not in _MODULES:
        _MODULES[module] = importlib.import_module(module)
    return _MODULES[module]


def block_width(width: int, least: int = 16) -> int:
    """Returns the columns of a block that holds whole rows: a power of two that covers `width`."""
    return max(least, 1 << (int(width) - 1).bit_length())


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a device: at least as many programs run at a
    time."""
    if device.type != "cuda":
        return 4  # in the interpreter or emulator: few programs, so that at least one has several tiles
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.compiler.assume_constant_result  # on an uncached function: a tracer looks into a cached one
def missing_for_hopper() -> str:
    """Returns the first unmet requirement of Gluon kernels on a machine with CUDA, or an empty string."""
    return _looked_for_hopper()


@lru_cache(maxsize=1)
def _looked_for_hopper() -> str:
    if torch.cuda.get_device_capability()[0] != 9:
        return "it needs a Hopper GPU"
    version = environment.installed_version("triton") or ""
    if not version.startswith(f"{GLUON}."):
        brings = f"torch {environment.FOR_GPUS.torch} brings it"
        return f"it needs Triton {GLUON}, this is {version or 'none'}; {brings}"
    environment.prefer_packaged_ptxas()
    path = environment.find_ptxas()
    ptxas_version = environment.tool_version(path) if path else ""
    if environment.version_numbers(ptxas_version) < environment.MINIMAL_PTXAS:
        return f"it needs ptxas 13.3 or later; type: {environment.newer_ptxas()}"
    return ""


@lru_cache(maxsize=1)
def _warn_about_assembler() -> None:
    """Warns once if the ptxas in use may miscompile kernels for Hopper."""
    path = environment.find_ptxas()
    version = environment.tool_version(path) if path else ""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if on_hopper and environment.version_numbers(version) < environment.MINIMAL_PTXAS:
        logger.warning(
            "ptxas %s (%s) miscompiles some Triton kernels on Hopper: wrong numbers or illegal accesses. "
            "Type: %s",
            version or "of unknown version",
            path,
            environment.newer_ptxas(),
        )
