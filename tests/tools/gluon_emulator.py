"""Runs a warp-specialised Gluon kernel for Hopper on a CPU, to test its logic: not layouts, not speed.

The functions of the kernel run as plain Python, with stand-ins for what Gluon offers: `gluon_values` has
blocks and pointers, `gluon_machine` has barriers, copies and products, and finds races and deadlocks.
Parameters and inline assembly that the stand-ins do not know are errors. Only what the kernels of
`recsys.ops` use is there.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from tests.tools import ptx
from tests.tools.gluon_clocks import Barrier
from tests.tools.gluon_machine import Machine, Memory
from tests.tools.gluon_values import Block, Number, Pointer, Pointers, raw

MAPS = {
    "tanh.approx.f32 $0, $1;": torch.tanh,
    "ex2.approx.ftz.f32 $0, $1;": torch.exp2,
}
"""Inline assembly that computes each element from one other."""

HARDWARE_BARRIER = re.compile(r"bar\.(sync|arrive) \$1, \$2; mov\.u32 \$0, 0;")


class Emulated:
    """Stands in for a kernel: `Emulated(kernel)[(programs,)](...)` runs one program after the other.

    `codes` replaces the code of functions, by the function, as tests with mutations need it.
    """

    _seeds = itertools.count()

    def __init__(self, kernel: Any, codes: Mapping[Any, CodeType] | None = None) -> None:
        self.kernel, self.codes = kernel, codes or {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> None:
            values = [_argument(argument) for argument in arguments]
            for program in range(grid[0]):
                machine = Machine(next(self._seeds), program, grid[0], num_warps)
                as_python(self.kernel, stand_ins(machine), codes=self.codes)(*values, **constants)
                machine.running.finish()

        return launch


def as_python(
    kernel: Any,
    replaced: Mapping[str, Any],
    done: dict[Any, Any] | None = None,
    codes: Mapping[Any, CodeType] | None = None,
) -> Any:
    """A jitted function as a plain one that calls plain ones."""
    done, codes = {} if done is None else done, codes or {}
    function = kernel.fn
    if function not in done:
        scope: dict[str, Any] = {}
        code = codes.get(function, function.__code__)
        done[function] = FunctionType(code, scope, function.__name__, function.__defaults__)
        for name in _names_in(code) & function.__globals__.keys():
            value = function.__globals__[name]
            if name in replaced:
                scope[name] = replaced[name]
            elif isinstance(value, triton.JITFunction | InterpretedFunction):
                scope[name] = as_python(value, replaced, done, codes)
            elif isinstance(value, triton.language.constexpr):
                scope[name] = value.value
            else:
                scope[name] = value
    return done[function]


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """The names that code and the functions within it read: a module of kernels has hundreds of others."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def stand_ins(machine: Machine) -> dict[str, Any]:
    """The stand-ins by the names that the kernels' modules have for the originals."""
    spoken = language(machine)
    return {
        "gl": spoken,
        "tl": spoken,
        "mbarrier": SimpleNamespace(
            init=machine.init,
            wait=machine.wait,
            expect=machine.expect,
            arrive=machine.arrive,
            MBarrierLayout=lambda: None,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=machine.copy_in,
            async_copy_shared_to_global=machine.copy_out,
            store_wait=machine.store_wait,
            make_tensor_descriptor=_descriptor,
        ),
        "async_add_to_global": machine.copy_add,
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.product_wait,
    }


def language(machine: Machine) -> SimpleNamespace:
    """The stand-in for the modules `gluon.language` and `triton.language`."""

    def allocate(element_ty: torch.dtype, shape: list[int], layout: Any) -> Memory:
        unset = float("nan") if element_ty.is_floating_point else -1
        barriers = [Barrier(machine.parties) for _ in range(shape[0])] if element_ty == torch.int64 else None
        return Memory(machine, torch.full(shape, unset, dtype=element_ty), barriers=barriers)

    def inline(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
        if asm in MAPS:
            return Block(MAPS[asm](args[0].data), args[0].type.layout)
        if asm == "mov.b32 $0, $1;":
            return Number(raw(args[0]))
        if barrier := HARDWARE_BARRIER.fullmatch(asm):
            number, threads = (int(raw(argument)) for argument in args)
            machine.named_barrier(number, threads, waits=barrier[1] == "sync")
            return Number(0)
        if asm.lstrip().startswith("{"):  # `ptx` fails on instructions that it does not know
            kinds = constraints.split(",")[pack::pack]
            values = [_array(value, kind) for value, kind in zip(args, kinds, strict=True)]
            return Block(torch.from_numpy(ptx.run_inline(asm, values, pack)), args[0].type.layout)
        raise NotImplementedError(f"the emulator does not know this assembly: {asm}")

    return SimpleNamespace(
        allocate_shared_memory=allocate,
        arange=lambda start, end, layout=None: Block(torch.arange(start, end), layout),
        atomic_add=_atomic_add,
        cast=lambda input, dtype: input.to(dtype),
        constexpr=lambda value: value,
        convert_layout=lambda value, layout: Block(value.data, layout),
        expand_dims=lambda input, axis: Block(input.data.unsqueeze(axis), input.type.layout),
        float16=torch.float16,
        float32=torch.float32,
        NVMMASharedLayout=lambda swizzle_byte_width, element_bitwidth, rank: None,
        full=lambda shape, value, dtype, layout: Block(torch.full(shape, raw(value), dtype=dtype), layout),
        inline_asm_elementwise=inline,
        int32=torch.int32,
        int64=torch.int64,
        uint32=torch.uint32,
        load=_load,
        store=lambda pointer, value, mask: pointer.store(value, mask),
        thread_barrier=lambda: None,  # threads of a partition run together here
        max=_max,
        sum=lambda input, axis: Block(input.data.sum(axis)),
        maximum=_extreme(max, torch.maximum),
        minimum=_extreme(min, torch.minimum),
        num_programs=lambda axis: Number(machine.programs),
        num_warps=lambda: machine.running.warps,
        program_id=lambda axis: Number(machine.program),
        static_assert=_static_assert,
        static_range=range,
        to_tensor=Number,
        warp_specialize=machine.specialize,
        where=_where,
        zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype), layout),
        NVMMADistributedLayout=lambda *args: ("mma", *map(str, args)),
        DotOperandLayout=lambda *args: ("operand", *map(str, args)),
        SliceLayout=lambda *args: ("slice", *map(str, args)),
        SwizzledSharedLayout=lambda vec, per_phase, max_phase, order: None,
        BlockedLayout=lambda *args: ("blocked", *map(str, args)),
    )


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(condition, Block):
        return Block(torch.where(condition.data, raw(x), raw(y)), condition.type.layout)
    return Number(x if condition else y)


def _extreme(of_numbers: Any, of_tensors: Any) -> Any:
    def apply(x: Any, y: Any) -> Any:
        if isinstance(x, Block) or isinstance(y, Block):
            block = x if isinstance(x, Block) else y
            return Block(of_tensors(*map(torch.as_tensor, (raw(x), raw(y)))), block.type.layout)
        return Number(of_numbers(raw(x), raw(y)))

    return apply


def _max(input: Block, axis: int) -> Block | Number:
    data = input.data
    return Number(data.max().item()) if data.dim() == 1 else Block(data.amax(axis))


def _load(pointer: Any, mask: Any = None, other: Any = None, *, cache_modifier: str = "") -> Any:
    if isinstance(pointer, Pointers):
        return pointer.load(mask, other)
    assert mask is None
    return Number(pointer.flat[pointer.offset].item())


def _atomic_add(pointer: Pointer, val: int, *, sem: str) -> Number:
    before = int(pointer.flat[pointer.offset])
    pointer.flat[pointer.offset] += val
    return Number(before)


def _static_assert(cond: bool, msg: str = "") -> None:
    assert cond, msg


def _array(value: Any, kind: str) -> np.ndarray:
    """An argument of inline assembly, by its constraint."""
    if isinstance(value, Block):
        return value.data.numpy()
    return np.array(raw(value), {"r": np.int32, "l": np.int64, "f": np.float32}[kind])


def _argument(value: Any) -> Any:
    """Converts an argument of a launch to the value that the kernel gets."""
    if isinstance(value, torch.Tensor):
        return Pointer(value.detach())
    if hasattr(value, "block_shape"):
        return _descriptor(
            Pointer(value.base.detach()), value.shape, value.strides, value.block_shape, value.layout
        )
    return Number(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _descriptor(
    base: Pointer, shape: list[Any], strides: list[Any], block_shape: list[int], layout: Any
) -> SimpleNamespace:
    return SimpleNamespace(
        base=base.flat,
        elements=len(base.flat),
        shape=list(map(raw, shape)),
        strides=list(map(raw, strides)),
        block_shape=block_shape,
        block_type=SimpleNamespace(nbytes=base.flat.element_size() * torch.Size(block_shape).numel()),
        dtype=base.flat.dtype,
        layout=layout,
    )
