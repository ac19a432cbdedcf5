"""How the Triton backends start a kernel: in a traced graph by a node of it, in eager mode the short way.

Triton's own way looks at every argument to find the compiled kernel again. `sm90_start`, which knows how to
do without, serves kernels without tensor maps as well; where it cannot be imported (it is written for one
Triton) Triton's way is taken.
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
    """The `wrap` of eager mode, where a traced graph has `torch.library.wrap_triton`."""
    return kernel


def launch(
    kernel: Any,
    programs: int,
    pointers: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
    wrap: Wrap | None = None,
) -> None:
    """`kernel[(programs,)](*pointers, *numbers, **constants)`.

    Args:
        numbers: not specialised on, and behind the pointers among the parameters of the kernel.
        constants: behind the numbers; always in the same order, since their values are the kernel's key.
        wrap: `torch.library.wrap_triton` in a traced graph.
    """
    short = _short_way() if wrap is None else None
    if short is None:
        kernel = kernel if wrap is None else wrap(kernel)
        kernel[(programs,)](*pointers, *numbers, **constants)
        return
    key = (*constants.values(), *[tensor.dtype for tensor in pointers])
    short.launch(kernel, key, programs, (), pointers, numbers, lambda: constants)


def launch_specialized(
    kernel: Any,
    programs: int,
    arguments: Sequence[Boxes | Tensor | int | float],
    constants: dict[str, Any],
    describe: Callable[[Boxes], Any],
) -> None:
    """`kernel[(programs,)](*arguments, **constants)` in eager mode, with what `describe` makes of boxes.

    For kernels that Triton compiles anew for some of their numbers, of which there must be few in all.
    """
    if (short := _short_way()) is not None:
        short.launch_specialized(kernel, programs, arguments, constants, describe)
        return
    given = [describe(one) if isinstance(one, Boxes) else one for one in arguments]
    kernel[(programs,)](*given, **constants)


@lru_cache(maxsize=1)
def _short_way() -> ModuleType | None:
    try:
        from recsys.ops.runtime import hopper_launch
    except ImportError:
        return None
    return hopper_launch
