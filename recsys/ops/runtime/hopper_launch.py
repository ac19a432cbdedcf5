"""Launches kernels with little work on the host, with or without tensor maps.

For every launch, Triton inspects all arguments to find the compiled kernel and encodes every tensor map anew:
over 100 us for four tensors with descriptors. Here Triton does so only for the first launch with a key. The
key of `launch` holds everything that the code of a kernel depends on. Later launches with that key encode
their tensor maps and call the C function that Triton built for the kernel. Triton's own launcher is used for
the first launch, for other versions of Triton, where a profiler has hooked launches, for an argument whose
alignment differs from that at compile time, and for a number that needs 64 bits.

Changing Triton's settings (TRITON_DEBUG and the like) after the first launch with a key has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST, CudaLauncher
from triton.runtime.driver import driver

from recsys.ops.runtime.descriptors import ALIGNMENT, Boxes, gluon_descriptor, shape_of
from recsys.ops.runtime.triton_support import num_processors

LAUNCHED_BY = "3.6."
"""The version of Triton whose launchers take the arguments that `_relaunch` passes."""


class _Encoding(NamedTuple):
    """Encoding of a tensor map, as chosen by the compiler."""

    swizzle: int
    elem_size: int
    elem_type: int
    block_size: tuple[int, ...]


class _Compiled(NamedTuple):
    """A kernel compiled for one device, with the arguments of its C launcher."""

    kernel: Any  # the source; its address is part of the key, so this keeps it alive
    launch: Callable[..., None]
    function: int
    metadata: Any
    encodings: tuple[_Encoding, ...]
    encode: Callable[..., Any]
    constants: tuple[None, ...]  # placeholders, which the launcher does not read


_COMPILED: dict[Hashable, _Compiled] = {}

STOCK = 256
"""Number of counters per allocation."""

_COUNTERS: dict[tuple[int, int], list[Tensor]] = {}
"""Unused counters by device and stream."""


def launch(
    kernel: Any,
    key: Hashable,
    programs: int,
    boxes: tuple[Boxes, ...],
    pointers: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: Callable[[], dict[str, Any]],
) -> None:
    """Runs `kernel[(programs,)](*boxes, *pointers, *numbers, **constants())` on the current stream.

    Args:
        key: everything that the code depends on besides the kernel and the device: constants, dtypes of
            tensors and sizes of boxes. The kernel must not be specialized on any of `numbers`.

    Raises:
        TypeError: Triton would specialize the kernel on one of `numbers`.
    """
    device = pointers[0].device
    compiled = _COMPILED.get((id(kernel), device.index, key))
    if compiled is not None and _relaunch(compiled, device, programs, (*boxes, *pointers, *numbers)):
        return
    require_one_code(kernel, len(boxes) + len(pointers), numbers)
    descriptors = [gluon_descriptor(box) for box in boxes]
    artefact = kernel[(programs,)](*descriptors, *pointers, *numbers, **constants())
    if compiled is None:
        _keep(kernel, key, artefact, device, pointers)


def launch_specialized(
    kernel: Any,
    programs: int,
    arguments: Sequence[Boxes | Tensor | int | float],
    constants: dict[str, Any],
    describe: Callable[[Boxes], Any],
) -> None:
    """Runs `kernel[(programs,)](*arguments, **constants)`; `describe` turns boxes into descriptors.

    This is for kernels that Triton specializes on some of their numbers: those numbers are part of the key,
    so they may take only few different values.
    """
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    device = tensors[0].device
    kinds = [_kind(arguments[place]) for place in _specialized_parameters(kernel, len(arguments))]
    key = (*constants.values(), *kinds)
    compiled = _COMPILED.get((id(kernel), device.index, key))
    if compiled is not None and _relaunch(compiled, device, programs, arguments):
        return
    described = [describe(value) if isinstance(value, Boxes) else value for value in arguments]
    artefact = kernel[(programs,)](*described, **constants)
    if compiled is None:
        _keep(kernel, key, artefact, device, tensors)


def _kind(argument: Boxes | Tensor | float) -> Hashable:
    """Returns the part of an argument that the code of a kernel may depend on."""
    if isinstance(argument, Boxes):
        return argument.tensor.dtype, argument.rows, argument.columns
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument if isinstance(argument, int) else float


_PLACES: dict[tuple[int, int], tuple[int, ...]] = {}


def _specialized_parameters(kernel: Any, number: int) -> tuple[int, ...]:
    """Returns the indices of those of the first `number` parameters that the code depends on."""
    place = (id(kernel), number)
    if place not in _PLACES:
        parameters = getattr(kernel, "params", [])[:number]
        _PLACES[place] = tuple(i for i, parameter in enumerate(parameters) if not parameter.do_not_specialize)
    return _PLACES[place]


def _keep(kernel: Any, key: Hashable, artefact: Any, device: torch.device, tensors: Sequence[Tensor]) -> None:
    """Stores a kernel that Triton has just launched, if `_relaunch` can launch it."""
    if isinstance(kernel, triton.JITFunction) and _aligned(tensors):
        compiled = _compiled(kernel, artefact, device)
        if compiled is not None:
            _COMPILED[(id(kernel), device.index, key)] = compiled


def require_one_code(kernel: Any, first: int, numbers: tuple[int | float, ...]) -> None:
    """Checks that a kernel's code is the same for all values of `numbers`, its parameters from index `first`
    on.

    Otherwise Triton would compile in the value 1 or divisibility by 16, and later launches would be wrong.

    Raises:
        TypeError: naming the parameter.
    """
    for parameter, number in zip(getattr(kernel, "params", [])[first:], numbers, strict=False):
        if isinstance(number, int) and not parameter.do_not_specialize:
            raise TypeError(
                f"{kernel.__name__}: parameter {parameter.name} belongs into do_not_specialize: later "
                "launches take the code of the first whatever the number is"
            )


def programs_for(device: torch.device, units: int) -> int:
    """Returns the number of programs to launch if each works through several units one after the other."""
    return min(num_processors(device), units)


def zero_counter(device: torch.device) -> Tensor:
    """Returns int32 [4] of zeros for one launch on the current stream.

    Not for code that a compiler captures, because the compiler must know of all memory that is kept. Each
    stream has a stock, which every `STOCK`-th call refills. A captured graph gets zeros of its own, which
    each replay makes anew.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    place = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
    while True:
        try:
            return _COUNTERS[place].pop()
        except (KeyError, IndexError):
            zeros = torch.zeros(STOCK, 4, dtype=torch.int32, device=device)
            _COUNTERS[place] = list(zeros.unbind(0))


def _relaunch(
    compiled: _Compiled, device: torch.device, programs: int, values: Sequence[Boxes | Tensor | int | float]
) -> bool:
    """Launches a compiled kernel and returns True, or returns False if only Triton's launcher can do so."""
    hooks = knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls or compiled.kernel.pre_run_hooks:
        return False
    index = device.index
    if torch.cuda.current_device() != index:
        return False
    arguments: list[Any] = []
    encodings = iter(compiled.encodings)
    for value in values:
        if isinstance(value, Tensor):
            address = value.data_ptr()
            if address % ALIGNMENT:
                return False
            arguments.append(address)
        elif isinstance(value, Boxes):
            tensor, encoding = value.tensor, next(encodings)
            shape, strides, both, _ = shape_of(tensor)
            arguments.append(compiled.encode(tensor.data_ptr(), *encoding, shape, strides, 0))
            arguments += both
        else:
            arguments.append(value)
    try:
        compiled.launch(
            programs,
            1,
            1,
            torch._C._cuda_getCurrentRawStream(index),
            compiled.function,
            False,
            False,
            None,
            None,
            compiled.metadata,
            None,
            None,
            None,
            *arguments,
            *compiled.constants,
        )
    except OverflowError:  # a number that needs 64 bits takes different code
        return False
    return True


def _aligned(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def _compiled(kernel: Any, artefact: Any, device: torch.device) -> _Compiled | None:
    """Returns the arguments of `_relaunch`, or None if it cannot launch this kernel with this Triton
    version."""
    if not triton.__version__.startswith(LAUNCHED_BY) or torch.cuda.current_device() != device.index:
        return None
    launcher = getattr(artefact, "run", None)
    if not isinstance(launcher, CudaLauncher):
        return None
    scratch = launcher.global_scratch_size + launcher.profile_scratch_size
    if scratch or launcher.launch_cooperative_grid or launcher.launch_pdl or launcher.num_ctas != 1:
        return None
    launch = launcher.launch
    if descriptors := getattr(artefact.metadata, "tensordesc_meta", None) or ():
        inside = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
        launch = inside["launcher"].cell_contents
    encodings = tuple(
        _Encoding(
            descriptor["swizzle"],
            descriptor["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[descriptor["elem_type"]],
            descriptor["block_size"],
        )
        for descriptor in descriptors
    )
    return _Compiled(
        kernel=kernel,
        launch=launch,
        function=artefact.function,
        metadata=artefact.packed_metadata,
        encodings=encodings,
        encode=driver.active.utils.fill_tma_descriptor,
        constants=(None,) * len(kernel.constexprs),
    )
