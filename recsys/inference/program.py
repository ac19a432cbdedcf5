"""Runs a compiled program of a package, after checking the inputs.

Native code does not check its inputs, so a wrong dtype or a strided tensor would silently give wrong scores.
"""

import importlib
import os
import stat
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from recsys.errors import InstallationError, RecsysError
from recsys.models.signature import TensorSpec


class PackageError(RecsysError):
    """A package is damaged, has another format, or no longer gives the answers that it was made with."""


class Program:
    """An AOTInductor package as a function of flat tensors.

    Args:
        path: path of the `.pt2` file.
        specs: specs of the program's inputs, in order.
        device: the device that the program was compiled for.
        op_libraries: modules that register the program's operators, imported first.
        weights: the weights by name, if the file does not hold them. They are not copied.
        recordable: whether calls may be recorded in CUDA graphs. Threads then take turns.
        look_up: looks up the inputs that follow those of `specs`, given these; None if there are no more. See
            `mapped_tables`.

    Raises:
        PackageError: a weight is missing, or the file is not an AOTInductor package.
        InstallationError: a module of `op_libraries` cannot be imported.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        device: torch.device,
        op_libraries: Sequence[str] = (),
        weights: Mapping[str, Tensor] | None = None,
        look_up: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None,
        *,
        recordable: bool = False,
    ):
        for name in op_libraries:
            _import(name, path)
        _require_archive(path)
        # The runtime reads this switch once, before the first call. It makes the runtime reject tensors of a
        # wrong type or shape.
        os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
        # `aoti_load_package` would first compile and run programs for the instruction sets that the processor
        # has, for up to half a minute, only to warn if the export knew others. Packages are compiled for
        # `export.march`, which is older than most machines on purpose; golden rows reveal a missing set.
        # A CUDA graph cannot record the events by which the runtime serves several threads at a time.
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", recordable, 1, -1)
        self._specs, self._device, self._process = list(specs), device, os.getpid()
        self._look_up, self._lock = look_up, threading.Lock() if recordable else nullcontext()
        # The program holds pointers to the weights, so they must live as long as the program.
        self._weights = None if weights is None else self._load_weights(weights, path)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Runs the program and returns the outputs, on the program's device.

        Raises:
            PackageError: names the input that does not fit; or this process is a fork of the one that loaded
                the program, whose threads it does not have, and would wait for them without end.
        """
        if os.getpid() != self._process:
            raise PackageError(
                "a package cannot be used in a fork of the process that loaded it: load it in each "
                "process, or start processes by the methods spawn or forkserver"
            )
        checked = check_inputs(tuple(inputs), self._specs)
        looked_up = self._look_up(checked) if self._look_up is not None else ()
        moved = [_to(self._device, tensor) for tensor in (*checked, *looked_up)]
        enter_device(self._device)
        with torch.no_grad(), self._lock:
            # The loader's own call takes as long again, to rebuild the structure of arguments and results,
            # which are flat here.
            return tuple(self._loader.boxed_run(moved))

    def _load_weights(self, weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
        # The arguments of the loader's own method depend on PyTorch's version. The import takes some time.
        from torch.export.pt2_archive._package import AOTICompiledModel

        constants, compiled = {}, AOTICompiledModel(self._loader)
        for name in compiled.get_constant_fqns():
            # A constant that only this program has is stored under the program's name.
            weight = weights.get(f"{path.stem}/{name}", weights.get(name))
            if weight is None:
                raise PackageError(f"{path}: its weight {name} is missing: export it again")
            constants[name] = weight
        compiled.load_constants(constants, check_full_update=True, user_managed=True)
        return constants


def _import(name: str, path: Path) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        problem = f"{path} needs operators of the Python module {name}, which cannot be imported ({error})"
        raise InstallationError(f"{problem}: install it") from error


def _require_archive(path: Path) -> None:
    """Raises PackageError unless the file is an uncompressed archive, as the compiler writes it.

    The loader extracts it into a temporary folder, which an archive of compressed zeros could fill, and
    entries with other paths could leave.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
    except (zipfile.BadZipFile, ValueError) as error:
        raise PackageError(f"{path}: not a compiled program ({error}): export it again") from error
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if name.is_absolute() or ".." in name.parts or is_link:
            raise PackageError(f"{path}: its entry {entry.filename!r} leads out of it: do not use it")
    if unpacked > path.stat().st_size:
        problem = f"its {path.stat().st_size:,} bytes unpack to {unpacked:,}"
        raise PackageError(f"{path}: {problem}, but a compiled program is not compressed: export it again")


def enter_device(device: torch.device) -> None:
    """Gives this thread a CUDA context, so that it can launch kernels of a package.

    A package launches kernels through the driver, which requires a context. A thread that has not used the
    device yet has none; PyTorch's own kernels would create it.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).query()


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    """Moves a tensor to a device without waiting for the device."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_inputs(inputs: tuple[Tensor, ...], specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """Checks number, dtypes and sizes of the inputs and returns them as contiguous tensors.

    Dims with equal names must have equal sizes, and a dim whose name is a number must have that size.

    Raises:
        PackageError: names the input that does not fit.
    """
    if len(inputs) != len(specs):
        raise PackageError(f"{len(inputs)} inputs given, the package has {len(specs)}")
    sizes: dict[str, int] = {}
    for spec, tensor in zip(specs, inputs, strict=True):
        if tensor.dtype != spec.dtype or tensor.dim() != len(spec.dims):
            actual = f"{tensor.dtype} with {tensor.dim()} dims"
            raise PackageError(
                f"input {spec.name} is {actual}; the package takes {spec.dtype} with {len(spec.dims)}"
            )
        for name, size in zip(spec.dims, tensor.shape, strict=True):
            wanted = int(name) if name.isdigit() else sizes.setdefault(name, size)
            if wanted != size:
                where = "" if name.isdigit() else " in an input before it"
                raise PackageError(f"input {spec.name}: dim {name} is {size}, {wanted}{where}")
    return tuple(tensor.contiguous() for tensor in inputs)
