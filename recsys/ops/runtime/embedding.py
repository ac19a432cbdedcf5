"""Embeds kernels in Gluon in packages of AOTInductor, which knows Triton's language only.

A graph launches a stand-in through `wrap_triton`: a kernel in Triton's language with the parameters of the
kernel in Gluon, whose body only says what is read and written. Within `embedding()` Inductor compiles the
kernel in Gluon where it would compile the stand-in. Machine code, number of warps, shared memory and scratch
memory then reach the package in Inductor's own ways, and the package needs neither Python nor this library.

Two names of PyTorch are replaced within the block; `reason_against` says whether they are as they must be.
This is internal to PyTorch, so tests compile a stand-in by Inductor, and every export compares the package
with the model. A stand-in that was compiled after all writes NaN.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from recsys.ops.runtime.dispatch import is_exporting

_KERNELS: dict[str, Any] = {}
"""Kernels in Gluon by the names of their stand-ins."""

_BLOCKS: list[Embedded] = []
"""The `embedding()` blocks that are running."""


@dataclass
class Embedded:
    """Stand-ins, by name, that graphs have launched and that Inductor has compiled within a block."""

    launched: set[str] = field(default_factory=set)
    compiled: set[str] = field(default_factory=set)


def embed(stand_in: Any, kernel: Any) -> None:
    """Registers a stand-in of a kernel in Gluon.

    Raises:
        TypeError: their parameters differ.
    """
    if not hasattr(stand_in, "params"):  # Triton interprets kernels in this process and compiles none
        return
    if _parameters(stand_in) != _parameters(kernel):
        raise TypeError(f"{stand_in.__name__} needs the parameters of {kernel.__name__}")
    _KERNELS[stand_in.__name__] = kernel


def _parameters(kernel: Any) -> list[tuple[str, bool]]:
    return [(parameter.name, parameter.is_constexpr) for parameter in kernel.params]


def launched(stand_in: Any) -> Any:
    """Returns the stand-in, to be launched in a graph; the block then checks that it gets compiled."""
    for block in _BLOCKS:
        block.launched.add(stand_in.__name__)
    return stand_in


def reason_against() -> str:
    """Returns why the graph that is traced now cannot have kernels in Gluon, or an empty string."""
    if not is_exporting():
        return ""
    if not _BLOCKS:
        return "only recsys.export can embed it in a package"
    return _unknown_pytorch()


@contextmanager
def embedding() -> Iterator[Embedded]:
    """Makes Inductor embed kernels in Gluon in what is captured and compiled within the block.

    Inductor must compile in this process (`compile_threads=1`) if stand-ins have been launched.

    Raises:
        RuntimeError: a stand-in was launched, but Inductor did not compile it here.
    """
    block = Embedded()
    with ExitStack() as stack:
        if _KERNELS and not _unknown_pytorch():
            from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
            from torch._inductor.runtime import triton_heuristics

            stack.enter_context(replaced(triton_heuristics, "ASTSource", _source_of(block)))
            scratch = _scratch_of_all_programs(CUDADeviceOpOverrides.cpp_scratch)
            stack.enter_context(replaced(CUDADeviceOpOverrides, "cpp_scratch", scratch))
        stack.callback(_BLOCKS.remove, block)
        _BLOCKS.append(block)
        yield block
    if missing := block.launched - block.compiled:
        names = ", ".join(sorted(missing))
        problem = f"PyTorch {torch.__version__} did not compile {names} where it gets the kernel in Gluon"
        raise RuntimeError(f"{problem}: name another backend, such as triton, in the config")


def _source_of(block: Embedded) -> Callable[..., Any]:
    """Returns what takes the place of Triton's `ASTSource` in Inductor."""
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    def source(fn: Any, *rest: Any) -> Any:
        kernel = _KERNELS.get(fn.__name__)
        if kernel is None:
            return ASTSource(fn, *rest)
        block.compiled.add(fn.__name__)
        return GluonASTSource(kernel, *rest)

    return source


def _scratch_of_all_programs(allocation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what takes the place of Inductor's code that allocates a kernel's scratch memory.

    The C++ of PyTorch 2.11 allocates the bytes of one program, however many there are
    (https://github.com/pytorch/pytorch/pull/175385).
    """

    def scaled(self: Any, idx: int, workspace: Any, prefix: str | None = None) -> Any:
        lines, name = allocation(self, idx, workspace, prefix)
        all_programs = f"{{{workspace.size}L * grid_0 * grid_1 * grid_2}}"
        return [lines[0].replace(f"{{{workspace.size}}}", all_programs), *lines[1:]], name

    return scaled


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of a library another value during the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@lru_cache(maxsize=1)
def _unknown_pytorch() -> str:
    """Returns why `embedding` does not know this PyTorch, or an empty string."""
    try:
        from torch._inductor.codegen.common import TritonScratchWorkspace
        from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
        from torch._inductor.runtime import triton_heuristics
        from triton.compiler.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        compiler = inspect.getsource(triton_heuristics.CachingAutotuner._precompile_config)
        scratch = _scratch_of_all_programs(CUDADeviceOpOverrides.cpp_scratch)
        allocation = scratch(CUDADeviceOpOverrides(), 0, TritonScratchWorkspace(512, str), "")[0]
    except (ImportError, AttributeError, TypeError) as error:
        return f"PyTorch {torch.__version__} compiles packages in a way that is not known ({error})"
    is_known = (
        triton_heuristics.ASTSource is ASTSource
        and all(
            list(inspect.signature(source).parameters) == ["fn", "signature", "constexprs", "attrs"]
            for source in (ASTSource, GluonASTSource)
        )
        and "=(ASTSource(self.fn,compile_meta[" in re.sub(r"\s", "", compiler)
        and "512" in allocation[0]
        and "* grid_0 * grid_1 * grid_2}" in allocation[0]
    )
    return "" if is_known else f"PyTorch {torch.__version__} compiles packages in a way that is not known"
