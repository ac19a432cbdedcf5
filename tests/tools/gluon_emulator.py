"""Runs a warp-specialised Gluon kernel for Hopper on a CPU, to test its logic: not layouts, not speed.

The functions of the kernel run as plain Python, each partition in a thread of its own, with stand-ins for
what Gluon offers: barriers with phases, copies that arrive late, products that happen when they are waited
for. It is an unfriendly machine. Shared memory is NaN from the start of a copy until its end, the numbers
that a product or a copy reads must not change between its start and its end, and what was stored must be
fenced before a descriptor reads it. A wait that takes long is a deadlock.

Only what `recsys/ops/hstu_attention/sm90_*.py` use is there.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from tests.tools import ptx

PATIENCE = 10.0
"""Seconds after which a wait is a deadlock."""

WARP_GROUP = 128
"""Threads."""


class Aborted(Exception):
    """Another partition failed."""


class Number:
    """A scalar; like all of the kernel's it has `to`."""

    def __init__(self, value: Any) -> None:
        self.value = value.value if isinstance(value, Number) else value

    def to(self, dtype: torch.dtype) -> Number:
        return Number(float(self.value) if dtype.is_floating_point else int(self.value))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        assert isinstance(self.value, int)
        return self.value


class Block:
    """A tensor in the registers of a partition."""

    def __init__(self, data: torch.Tensor, layout: Any = None) -> None:
        self.data = data
        self.type = SimpleNamespace(layout=layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.data.reshape(shape), self.type.layout)

    def permute(self, order: tuple[int, ...]) -> Block:
        return Block(self.data.permute(order), self.type.layout)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return Block(self.data.view(dtype) if bitcast else self.data.to(dtype), self.type.layout)


def raw(x: Any) -> Any:
    return x.value if isinstance(x, Number) else x.data if isinstance(x, Block) else x


def _operator(name: str) -> None:
    def apply(self: Any, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        given, theirs = raw(self), raw(other)
        if isinstance(self, Number) and isinstance(other, Block):
            return NotImplemented
        if name in ("__floordiv__", "__rfloordiv__") and isinstance(given, int):
            assert given >= 0 and theirs > 0, "C and Python divide negative numbers differently"
        made = getattr(given, name)(theirs)
        if made is NotImplemented and isinstance(theirs, float):
            made = getattr(float(given), name)(theirs)
        return Block(made, self.type.layout) if isinstance(self, Block) else Number(made)

    for owner in (Number, Block):
        setattr(owner, name, apply)


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    _operator(f"__{_name}__")
    _operator(f"__r{_name}__")
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(f"__{_name}__")


class Pointer:
    """Into a tensor, at an element."""

    def __init__(self, tensor: torch.Tensor, offset: int = 0) -> None:
        self.flat, self.offset = tensor.view(-1), offset

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.flat.dtype)

    def to(self, dtype: torch.dtype) -> Number:
        """The address, for inline assembly."""
        assert dtype == torch.int64
        return Number(self.flat.data_ptr() + self.offset * self.flat.element_size())

    def __add__(self, other: Any) -> Pointer | Pointers:
        if isinstance(other, Block):
            return Pointers(self.flat, self.offset + other.data)
        return Pointer(self.flat, self.offset + int(raw(other)))


class Pointers:
    """A block of them."""

    def __init__(self, flat: torch.Tensor, offset: torch.Tensor) -> None:
        self.flat, self.offset = flat, offset

    def load(self, mask: Block | None, other: float | None) -> Block:
        if mask is None:
            assert (self.offset >= 0).all() and (self.offset < len(self.flat)).all()
            return Block(self.flat[self.offset], None)
        assert (self.offset[mask.data] >= 0).all() and (self.offset[mask.data] < len(self.flat)).all()
        found = self.flat[self.offset.clamp(0, len(self.flat) - 1)]
        return Block(torch.where(mask.data, found, torch.full_like(found, other)), None)

    def store(self, value: Block, mask: Block) -> None:
        assert value.data.dtype == self.flat.dtype
        offset = self.offset[inside := mask.data.expand(self.offset.shape)]
        assert (offset >= 0).all() and (offset < len(self.flat)).all()
        self.flat[offset] = value.data[inside]


class Memory:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, machine: Machine, data: torch.Tensor, barriers: Any = None) -> None:
        self.machine, self.data, self.barriers = machine, data, barriers

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> Memory:
        i = int(raw(i))
        assert 0 <= i < self.data.shape[0]
        return Memory(self.machine, self.data[i], None if self.barriers is None else [self.barriers[i]])

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Memory(self.machine, self.data.narrow(dim, start, length))

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.machine, self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.machine, self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        start = self.data.view(-1).view(dtype)[: torch.Size(shape).numel()]  # it may be larger
        return Memory(self.machine, start.view(shape))

    def addresses(self) -> tuple[int, int]:
        extent = sum((n - 1) * s for n, s in zip(self.data.shape, self.data.stride(), strict=True)) + 1
        start = self.data.data_ptr()
        return start, start + extent * self.data.element_size()

    def store(self, block: Block) -> None:
        assert self.data.shape == block.data.shape and self.data.dtype == block.data.dtype
        with self.machine.changed:
            self.machine.unfenced.append((threading.get_ident(), *self.addresses()))
            self.data.copy_(block.data)

    def load(self, layout: Any) -> Block:
        return Block(self.data.clone(), layout)

    def must_be_fenced(self) -> None:
        start, end = self.addresses()
        with self.machine.changed:
            stored = any(start < high and low < end for _, low, high in self.machine.unfenced)
        assert not stored, "no fence between a store and what reads it through a descriptor"


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = 0
        self.bytes = 0
        self.phase = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier expects"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Pending:
    """A product that has been started."""

    def __init__(self, run: Any, layout: Any) -> None:
        self.run, self.layout, self.result = run, layout, None


class Machine:
    """One launch: everything that its partitions share."""

    def __init__(self, seed: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.local = threading.local()
        self.random = random.Random(seed)
        self.failure: BaseException | None = None
        self.copies: list[Any] = []
        self.named: dict[int, int] = {}
        self.unfenced: list[tuple[int, int, int]] = []
        self.program = self.programs = 0
        self.running = 0

    def wait_until(self, ready: Any, what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not ready():
            if self.failure is not None:
                raise Aborted
            if not self.changed.wait(0.2) and time.monotonic() > end:
                raise TimeoutError(f"deadlock: {threading.current_thread().name} waits for {what}")

    def step(self) -> None:
        """Lets some time pass: one copy may arrive."""
        if self.copies and self.random.random() < 0.5:
            self.copies.pop(self.random.randrange(len(self.copies)))()
            self.changed.notify_all()

    # mbarrier

    def init(self, memory: Memory, count: int) -> None:
        barrier = memory.barriers[0]
        barrier.count = barrier.pending = count

    def wait(self, memory: Memory, parity: Any, pred: Any = True, deps: Any = ()) -> None:
        parity, barrier = int(raw(parity)), memory.barriers[0]
        assert parity in (0, 1)

        def ready() -> bool:
            self.step()
            while barrier.phase % 2 == parity and self.copies:  # nothing else may be able to go on
                self.copies.pop(0)()
                self.changed.notify_all()
            return barrier.phase % 2 != parity

        with self.changed:
            self.wait_until(ready, f"a barrier in phase {barrier.phase}, parity {parity}")

    def expect(self, memory: Memory, count: int, pred: Any = True) -> None:
        with self.changed:
            barrier = memory.barriers[0]
            barrier.bytes += count
            barrier.pending -= 1
            barrier.settle()
            self.changed.notify_all()

    def arrive(self, memory: Memory, *, count: int = 1, pred: Any = True) -> None:
        with self.changed:
            if bool(raw(pred)):
                barrier = memory.barriers[0]
                barrier.pending -= count
                barrier.settle()
            self.changed.notify_all()
        if self.random.random() < 0.2:
            time.sleep(0.001)  # whoever waited for this goes on first

    # Copies through descriptors

    def box(self, descriptor: Any, coordinates: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets of the elements of a box from the tensor's start, and whether they are in bounds."""
        offset, inside = torch.zeros([1] * len(coordinates), dtype=torch.int64), torch.tensor(True)
        size = descriptor.base.element_size()
        for axis, (place, extent) in enumerate(zip(coordinates, descriptor.block_shape, strict=True)):
            place = int(raw(place))
            assert -(2**31) <= place < 2**31
            shape = [-1 if other == axis else 1 for other in range(len(coordinates))]
            at = (torch.arange(extent, dtype=torch.int64) + place).view(shape)
            inside = inside & (at >= 0) & (at < descriptor.shape[axis])
            offset = offset + at * (descriptor.strides[axis] * size)  # wraps around like an address
        return torch.div(offset, size, rounding_mode="floor"), inside

    def copy_in(self, descriptor: Any, coordinates: list[Any], barrier: Memory, memory: Memory) -> None:
        offset, inside = self.box(descriptor, coordinates)
        flat = torch.as_strided(descriptor.base, (descriptor.elements,), (1,))
        assert (offset[inside] >= 0).all() and (offset[inside] < descriptor.elements).all()
        with self.changed:
            memory.data.fill_(float("nan"))
            assert memory.data.shape == offset.shape

            def land() -> None:
                values = flat[offset.clamp(0, descriptor.elements - 1)]
                memory.data.copy_(torch.where(inside, values, torch.zeros_like(values)))
                barrier.barriers[0].bytes -= memory.data.numel() * memory.data.element_size()
                assert barrier.barriers[0].bytes >= 0
                barrier.barriers[0].settle()

            self.copies.append(land)

    def copy_out(self, descriptor: Any, coordinates: list[Any], memory: Memory, adds: bool = False) -> None:
        offset, inside = self.box(descriptor, coordinates)
        memory.must_be_fenced()
        flat = torch.as_strided(descriptor.base, (descriptor.elements,), (1,))
        before = memory.data.clone()
        assert before.shape == offset.shape and before.dtype == flat.dtype

        def land() -> None:
            assert torch.equal(before, memory.data), "overwritten before the copy had read it"
            assert (offset[inside] >= 0).all() and (offset[inside] < descriptor.elements).all()
            old = flat[offset[inside]] if adds else 0
            flat[offset[inside]] = memory.data[inside] + old

        self.local.stores.append(land)

    def copy_add(self, descriptor: Any, coordinates: list[Any], memory: Memory) -> None:
        self.copy_out(descriptor, coordinates, memory, adds=True)

    def store_wait(self, pendings: int) -> None:
        with self.changed:
            while len(self.local.stores) > pendings:
                self.local.stores.pop(0)()

    def fence(self) -> None:
        with self.changed:
            self.unfenced = [stored for stored in self.unfenced if stored[0] != threading.get_ident()]

    # Products

    def product(self, a: Any, b: Memory, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        for operand in (a, b):
            if isinstance(operand, Memory):
                operand.must_be_fenced()
        reads = [x.data.clone() if isinstance(x, Memory) else x.data for x in (a, b)]
        assert all(torch.isfinite(x).all() for x in reads), "an operand that was not loaded, or is infinite"

        def run() -> Block:
            for x, before in zip((a, b), reads, strict=True):
                assert torch.equal(x.data, before), "an operand was overwritten"
            made = reads[0].float() @ reads[1].float()
            base = acc.result if isinstance(acc, Pending) else acc
            return Block(made + base.data if use_acc else made, base.type.layout)

        queue = self.local.products
        queue.append(Pending(run, None))
        if is_async:
            return queue[-1]
        return self.product_wait(0, (queue[-1],))

    def product_wait(self, num_outstanding: int = 0, deps: Any = ()) -> Any:
        queue = self.local.products
        with self.changed:
            while len(queue) > num_outstanding:
                product = queue.pop(0)
                product.result = product.run()
        results = []
        for dep in deps:  # what is still pending can only be added to
            done = isinstance(dep, Pending) and dep.result is not None
            results.append(dep.result if done else dep)
        return results[0] if len(results) == 1 else tuple(results)

    # Hardware barriers

    def named_barrier(self, number: int, threads: int, waits: bool) -> None:
        with self.changed:
            before = self.named.get(number, 0)
            self.named[number] = before + WARP_GROUP
            self.changed.notify_all()
            if waits:
                end = (before // threads + 1) * threads
                self.wait_until(lambda: self.named[number] >= end, f"hardware barrier {number}")

    def specialize(self, partitions: Any, num_warps: Any, registers: Any) -> None:
        def work(function: Any, arguments: Any) -> None:
            self.local.products, self.local.stores = [], []
            try:
                function(*arguments)
                assert not self.local.products, "products that nothing waits for"
                assert not self.local.stores, "copies that nothing waits for"
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                with self.changed:
                    if not isinstance(error, Aborted) and self.failure is None:
                        self.failure = error
                    self.changed.notify_all()

        threads = [
            threading.Thread(target=work, args=partition, name=f"{partition[0].__name__} {number}")
            for number, partition in enumerate(partitions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


def _where(condition: Any, one: Any, other: Any) -> Any:
    if isinstance(condition, Block):
        layout = condition.type.layout
        return Block(torch.where(condition.data, raw(one), raw(other)), layout)
    return Number(one if condition else other)


def _extreme(pick: Any, name: str) -> Any:
    def apply(one: Any, other: Any) -> Any:
        if isinstance(one, Block) or isinstance(other, Block):
            block = one if isinstance(one, Block) else other
            return Block(
                getattr(torch, name)(*map(torch.as_tensor, (raw(one), raw(other)))), block.type.layout
            )
        return Number(pick(raw(one), raw(other)))

    return apply


def _maximum_of(x: Block, axis: int) -> Block | Number:
    return Number(x.data.max().item()) if x.data.dim() == 1 else Block(x.data.amax(axis))


def _array(value: Any, kind: str) -> np.ndarray:
    """An argument of inline assembly, by its constraint."""
    if isinstance(value, Block):
        return value.data.numpy()
    return np.array(raw(value), {"r": np.int32, "l": np.int64, "f": np.float32}[kind])


def language(machine: Machine) -> SimpleNamespace:
    """What stands in for the modules `gluon.language` and `triton.language`."""

    def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
        data = (
            torch.full(shape, float("nan")).to(dtype)
            if dtype.is_floating_point
            else torch.full(shape, -1, dtype=dtype)
        )
        barriers = [Barrier() for _ in range(shape[0])] if dtype == torch.int64 else None
        return Memory(machine, data, barriers)

    def inline(asm: str, constraints: str, args: list[Any], **rest: Any) -> Any:
        if asm.startswith("cp.async.bulk.wait_group"):
            machine.store_wait(int(asm.split(";")[0].split()[-1]))
            return Number(0)
        if asm.startswith("fence.proxy.async"):
            return Number(0)
        if asm.startswith("tanh"):
            return Block(torch.tanh(args[0].data), args[0].type.layout)
        if asm.startswith("ex2"):
            return Block(torch.exp2(args[0].data), args[0].type.layout)
        if asm.startswith("mov"):
            return Number(raw(args[0]))
        if "pack" in rest and "{" in asm:
            kinds = constraints.split(",")[rest["pack"] :: rest["pack"]]
            given = [_array(value, kind) for value, kind in zip(args, kinds, strict=True)]
            return Block(torch.from_numpy(ptx.run_inline(asm, given, rest["pack"])), args[0].type.layout)
        number, threads = (int(raw(argument)) for argument in args)
        machine.named_barrier(number, threads, waits=asm.startswith("bar.sync"))
        return Number(0)

    def load(pointer: Any, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Any:
        if isinstance(pointer, Pointers):
            return pointer.load(mask, other)
        return Number(pointer.flat[pointer.offset].item())

    def atomic_add(pointer: Pointer, value: int, sem: str) -> Number:
        before = int(pointer.flat[pointer.offset])
        pointer.flat[pointer.offset] += value
        return Number(before)

    def require(condition: bool, message: str = "") -> None:
        assert condition, message

    return SimpleNamespace(
        allocate_shared_memory=allocate,
        arange=lambda start, end, layout=None: Block(torch.arange(start, end), layout),
        atomic_add=atomic_add,
        cast=lambda x, dtype: x.to(dtype),
        constexpr=lambda x: x,
        convert_layout=lambda x, layout: Block(x.data, layout),
        expand_dims=lambda x, axis: Block(x.data.unsqueeze(axis), x.type.layout),
        float16=torch.float16,
        float32=torch.float32,
        NVMMASharedLayout=lambda **rest: None,
        full=lambda shape, value, dtype, layout: Block(torch.full(shape, raw(value), dtype=dtype), layout),
        inline_asm_elementwise=inline,
        int32=torch.int32,
        int64=torch.int64,
        uint32=torch.uint32,
        load=load,
        store=lambda pointer, value, mask: pointer.store(value, mask),
        thread_barrier=lambda: None,
        max=_maximum_of,
        sum=lambda x, axis: Block(x.data.sum(axis)),
        maximum=_extreme(max, "maximum"),
        minimum=_extreme(min, "minimum"),
        num_programs=lambda axis: Number(machine.programs),
        num_warps=lambda: 4,
        program_id=lambda axis: Number(machine.program),
        static_assert=require,
        static_range=range,
        to_tensor=Number,
        warp_specialize=machine.specialize,
        where=_where,
        zeros=lambda shape, dtype, layout: Block(torch.zeros(shape, dtype=dtype), layout),
        NVMMADistributedLayout=lambda *args: ("mma", *map(str, args)),
        DotOperandLayout=lambda *args: ("operand", *map(str, args)),
        SliceLayout=lambda *args: ("slice", *map(str, args)),
        SwizzledSharedLayout=lambda *args: None,
        BlockedLayout=lambda *args: ("blocked", *map(str, args)),
    )


def stand_ins(machine: Machine) -> dict[str, Any]:
    """By the names that the kernels' modules have for the originals."""
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
        ),
        "async_add_to_global": machine.copy_add,
        "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.product_wait,
    }


def as_python(kernel: Any, replaced: dict[str, Any], done: dict[Any, Any] | None = None) -> Any:
    """A jitted function as a plain one that calls plain ones."""
    done = {} if done is None else done
    function = kernel.fn
    if function not in done:
        scope: dict[str, Any] = {}
        done[function] = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        for name, value in function.__globals__.items():
            if name in replaced:
                scope[name] = replaced[name]
            elif isinstance(value, triton.JITFunction | InterpretedFunction):
                scope[name] = as_python(value, replaced, done)
            elif isinstance(value, triton.language.constexpr):
                scope[name] = value.value
            else:
                scope[name] = value
    return done[function]


class Emulated:
    """In the place of a kernel: `Emulated(kernel)[(programs,)](...)` runs one program after the other."""

    _seeds = itertools.count()

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> None:
            given = [_argument(argument) for argument in arguments]
            for program in range(grid[0]):
                machine = Machine(next(self._seeds))
                machine.program, machine.programs = program, grid[0]
                machine.local.products, machine.local.stores = [], []
                as_python(self.kernel, stand_ins(machine))(*given, **constants)
                assert not machine.local.products, "products that nothing waits for"

        return launch


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value.detach())
    if hasattr(value, "block_shape"):
        tensor = value.base.detach()
        elements = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        itemsize = tensor.element_size()
        nbytes = itemsize * torch.Size(value.block_shape).numel()
        return SimpleNamespace(
            base=tensor,
            elements=elements,
            shape=value.shape,
            strides=value.strides,
            block_shape=value.block_shape,
            block_type=SimpleNamespace(nbytes=nbytes),
            dtype=tensor.dtype,
            layout=value.layout,
        )
    return Number(value) if isinstance(value, int) and not isinstance(value, bool) else value
