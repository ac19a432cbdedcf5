"""Launches Triton kernels: through a node of the graph if one is traced, otherwise with little host work.

Triton's own launcher inspects every argument to find the compiled kernel. `hopper_launch` avoids that, also
for kernels without tensor maps. It is written for one version of Triton; with other versions Triton's own
launcher is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import Tensor

from recsys.ops.runtime.descriptors import Boxes

Wrap = Callable[[Any], Any]


def unwrapped(kernel: Any) -> Any:
    """Returns the kernel itself: the `wrap` of eager mode, in place of `torch.library.wrap_triton` in a
    traced graph."""
    return kernel


def is_zero(size: int) -> bool:
    """Returns whether a size is 0. A symbolic one counts as nonzero: a graph serves all sizes, and launches
    nothing where a grid is empty."""
    return isinstance(size, int) and size == 0


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
    wrap: Wrap | None = None,
) -> None:
    """Runs `kernel[(programs,)](*pointers, *numbers, **constants)`.

    Args:
        numbers: parameters after the pointers, on which the kernel is not specialized.
        constants: parameters after the numbers, always in the same order, since their values are the key.
        wrap: `torch.library.wrap_triton` in a traced graph.
    """
    fast = _fast_launcher() if wrap is None else None
    if fast is None:
        kernel = kernel if wrap is None else wrap(kernel)
        kernel[(programs,)](*pointers, *numbers, **constants)
        return
    key = (*constants.values(), *[tensor.dtype for tensor in pointers])
    fast.launch(kernel, key, programs, (), pointers, numbers, lambda: constants)


def launch_specialized(
    kernel: Any,
    programs: int,
    arguments: Sequence[Boxes | Tensor | int | float],
    constants: dict[str, Any],
    describe: Callable[[Boxes], Any],
) -> None:
    """Runs `kernel[(programs,)](*arguments, **constants)` in eager mode; `describe` turns boxes into
    descriptors.

    This is for kernels that Triton specializes on some of their numbers, which may take only few different
    values.
    """
    if (fast := _fast_launcher()) is not None:
        fast.launch_specialized(kernel, programs, arguments, constants, describe)
        return
    described = [describe(value) if isinstance(value, Boxes) else value for value in arguments]
    kernel[(programs,)](*described, **constants)


@lru_cache(maxsize=1)
def _fast_launcher() -> ModuleType | None:
    try:
        from recsys.ops.runtime import hopper_launch
    except ImportError:
        return None
    return hopper_launch
