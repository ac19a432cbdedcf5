"""One compiled program of a package: native code that does not check its inputs, and what checks them.

A wrong dtype or a strided tensor would give wrong scores without a word.
"""

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import config as inductor

from recsys.errors import RecsysError
from recsys.models.signature import TensorSpec


class PackageError(RecsysError):
    """A package that is damaged, of another format, or does not compute what it computed when it was made."""


class Program:
    """An AOTInductor package as a function of flat tensors.

    Args:
        path: of the `.pt2` file.
        specs: of its inputs, in order.
        device: that it was compiled for.
        op_libraries: modules that register its operators; imported first.
        weights: what it computes with, by name, when it does not hold them itself. They are not copied.

    Raises:
        PackageError: a weight is missing.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        device: torch.device,
        op_libraries: Sequence[str] = (),
        weights: Mapping[str, Tensor] | None = None,
    ):
        for name in op_libraries:
            importlib.import_module(name)
        # The runtime reads this switch once, before the first call: it then refuses tensors of a wrong type
        # or shape.
        os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
        loader = logging.getLogger("torch.export.pt2_archive._package")
        loader.addFilter(_is_not_target_warning)
        try:
            # It compares this processor with the one of the export, for the warning that is not wanted, and
            # would compile and start a program for each instruction set to find out what there is: a minute.
            with inductor.patch("cpp.vec_isa_ok", True):
                self._compiled = torch._inductor.aoti_load_package(str(path))
        finally:
            loader.removeFilter(_is_not_target_warning)
        self._specs, self._device = list(specs), device
        # The program points at them: they live as long as it does.
        self._weights = None if weights is None else self._own(weights, path)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Its outputs, on its device.

        Raises:
            PackageError: naming the input that does not fit.
        """
        moved = check_inputs(tuple(_to(self._device, tensor) for tensor in inputs), self._specs)
        enter_device(self._device)
        with torch.no_grad():
            output = self._compiled(*moved)
        return tuple(output) if isinstance(output, list | tuple) else (output,)

    def _own(self, weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
        found = {}
        for name in self._compiled.get_constant_fqns():
            # What only this program has bears its name.
            own = weights.get(f"{path.stem}/{name}", weights.get(name))
            if own is None:
                raise PackageError(f"{path}: its weight {name} is missing: export it again")
            found[name] = own
        self._compiled.load_constants(found, check_full_update=True, user_managed=True)
        return found


def enter_device(device: torch.device) -> None:
    """Lets this thread start kernels of a package: these ask the driver, for which a thread that has not yet
    used the device has no context. PyTorch's own kernels make one.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor on a device, without waiting for what that is doing."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def check_inputs(inputs: tuple[Tensor, ...], specs: Sequence[TensorSpec]) -> tuple[Tensor, ...]:
    """The inputs, contiguous, after checking number, dtypes and that equally named dims are equal; a dim that
    is named by a number has that size.

    Raises:
        PackageError: naming the input.
    """
    if len(inputs) != len(specs):
        raise PackageError(f"{len(inputs)} inputs given, the package has {len(specs)}")
    sizes: dict[str, int] = {}
    for spec, tensor in zip(specs, inputs, strict=True):
        if tensor.dtype != spec.dtype or tensor.dim() != len(spec.dims):
            given = f"{tensor.dtype} with {tensor.dim()} dims"
            raise PackageError(
                f"input {spec.name} is {given}; the package takes {spec.dtype} with {len(spec.dims)}"
            )
        for name, size in zip(spec.dims, tensor.shape, strict=True):
            wanted = int(name) if name.isdigit() else sizes.setdefault(name, size)
            if wanted != size:
                where = "" if name.isdigit() else " in an input before it"
                raise PackageError(f"input {spec.name}: dim {name} is {size}, {wanted}{where}")
    return tuple(tensor.contiguous() for tensor in inputs)


def _is_not_target_warning(record: logging.LogRecord) -> bool:
    # A package is compiled for `export.march`, older than most machines on purpose; an instruction set that a
    # machine lacks shows in the golden rows at the latest.
    return "Device information mismatch" not in record.getMessage()
