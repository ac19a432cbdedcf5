"""Runs the PTX of inline assembly on a CPU: the few instructions that `recsys` writes, all threads at once.

A register is 64 bits a thread, whatever its type. Branches must be taken by all threads or by none.
"""

import ctypes
import math
import re
from functools import cache
from typing import NamedTuple

import numpy as np

SIGNED, UNSIGNED = {32: np.int32, 64: np.int64}, {16: np.uint16, 32: np.uint32, 64: np.uint64}
COMPARE = {"ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal}
COMPARE |= {"ne": np.not_equal, "neu": np.not_equal}


class Memory:
    """Arrays at addresses."""

    def __init__(self):
        self.arrays, self.next = [], 1 << 33

    def place(self, array):
        """Gives a contiguous array an address; kernels write it in place."""
        data = array.reshape(-1).view(np.uint8)
        assert np.shares_memory(data, array) or data.size == 0
        address = self.next
        self.arrays.append((address, data))
        self.next += (data.size + 4096) // 4096 * 4096 + (1 << 20)
        return address

    def find(self, addresses, size):
        for start, data in self.arrays:
            first = int(addresses.min()) - start
            if 0 <= first and int(addresses.max()) - start + size <= data.size:
                assert not (addresses % size).any(), f"misaligned for {size} bytes"
                return data, (addresses - np.uint64(start)).astype(np.int64)
        raise AssertionError(f"outside of all arrays: {addresses.min():x} to {addresses.max():x}")

    def load(self, addresses, size):
        data, at = self.find(addresses, size)
        return data[at[:, None] + np.arange(size)].copy()

    def add(self, addresses, values):
        data, at = self.find(addresses, 4)
        np.add.at(data.view(np.float32), at // 4, values)


def bits(values):
    """Values of any type as uint64."""
    values = np.asarray(values)
    return values.view(UNSIGNED[values.dtype.itemsize * 8]).astype(np.uint64)


SHARED: dict[str, np.ndarray] = {}
"""Shared memory of the program that runs, by name: it outlives a piece of assembly."""

SHARED_AT = 1 << 20
"""Address of the first name in shared memory, and the distance between names, in bytes."""


@cache
def width_of(kind):
    """Bits of a type of registers."""
    return int(re.sub(r"\D", "", kind)[:2] or 32)


class Step(NamedTuple):
    """An instruction: its name in parts, and the predicate of the threads that execute it."""

    parts: list[str]
    operands: list[str]
    predicate: str
    negated: bool


@cache
def parsed(text):
    """Shared memory by name and size, the instructions, and the number of the one behind each label."""
    lines = [line.strip() for line in text.strip().strip("{}").splitlines()]
    shared = [re.fullmatch(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\];", line) for line in lines]
    steps, labels = [], {}
    for line in lines:
        if not line.strip("{}") or line.startswith((".reg", ".shared")):
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(steps)
            continue
        assert line.endswith(";"), line
        negated, predicate, line = re.fullmatch(r"(?:@(!?)(\w+)\s+)?(.*);", line).groups()
        name, _, rest = line.partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        steps.append(Step(name.split("."), operands, predicate or "", negated == "!"))
    return [(size[1], int(size[2])) for size in shared if size], steps, labels


class Threads:
    """Threads of one program."""

    def __init__(self, count, memory):
        self.count, self.memory, self.registers = count, memory, {}

    def read(self, name, kind):
        raw = self.registers.get(name)
        if raw is None:
            raw = self.constant(name)
        if kind == "pred":
            return raw.astype(bool)
        width = width_of(kind)
        raw = raw.astype(UNSIGNED[width])  # the lower bits
        if kind.startswith("f"):
            return raw.view(np.float32)
        return raw.view(SIGNED[width]) if kind.startswith("s") else raw

    def constant(self, name):
        if name == "%tid.x":
            return np.arange(self.count, dtype=np.uint64)
        if name in SHARED:
            return np.full(self.count, SHARED_AT * (1 + list(SHARED).index(name)), np.uint64)
        number = int(name[2:], 16) if re.fullmatch(r"0f[0-9A-Fa-f]{8}", name) else int(name, 0)
        return np.full(self.count, number % 2**64, np.uint64)

    def write(self, name, values, active):
        new = values.astype(np.uint64) if values.dtype == bool else bits(values)
        old = self.registers.get(name, np.zeros(self.count, np.uint64))
        self.registers[name] = np.where(active, new, old)

    def run(self, text):
        """Executes the lines; the caller has set the input registers."""
        shared, steps, labels = parsed(text)
        for name, size in shared:
            SHARED[name] = np.full(size, 255, np.uint8)
        at, everyone = 0, np.ones(self.count, bool)
        while at < len(steps):
            step = steps[at]
            at += 1
            active = everyone
            if step.predicate:
                active = self.read(step.predicate, "pred") ^ step.negated
            if step.parts[0] != "bra":
                with np.errstate(all="ignore"):
                    self.execute(step.parts, step.operands, active)
                continue
            assert active.all() or not active.any(), f"threads part at {step}"
            if active.all():
                at = labels[step.operands[0]]

    def address(self, operand):
        base, _, offset = operand.strip("[]").partition("+")
        return self.read(base, "u64") + np.uint64(int(offset or "0") % 2**64)

    def execute(self, parts, operands, active):
        name, kind = parts[0], parts[-1]
        if name == "bar":  # the threads run together
            return None
        if parts[1] == "shared":
            return self.reach_shared(parts, operands, active)
        if name in ("ld", "red"):
            return self.reach(parts, operands, active)
        if name == "setp":
            left, right = (self.read(operand, kind) for operand in operands[1:3])
            made = COMPARE[parts[1]](left, right)
            if parts[2] in ("and", "or"):
                third = self.read(operands[3], "pred")
                made = made & third if parts[2] == "and" else made | third
            return self.write(operands[0], made, active)
        if name == "selp":
            left, right = (self.read(operand, kind) for operand in operands[1:3])
            return self.write(operands[0], np.where(self.read(operands[3], "pred"), left, right), active)
        if name == "cvt":
            return self.write(operands[0], self.convert(parts, operands), active)
        values = [self.read(operand, kind) for operand in operands[1:]]
        if name == "mad" and "wide" in parts:
            wide = np.int64 if kind.startswith("s") else np.uint64
            product = values[0].astype(wide) * values[1].astype(wide)
            return self.write(operands[0], product + self.read(operands[3], kind[0] + "64"), active)
        return self.write(operands[0], self.compute(name, parts, values, kind), active)

    def compute(self, name, parts, values, kind):
        if name == "mov":
            return values[0]
        if name in ("add", "sub"):
            made = values[0] + values[1] if name == "add" else values[0] - values[1]
            return np.nan_to_num(np.clip(made, 0, 1)).astype(np.float32) if "sat" in parts else made
        if name in ("mul", "mad"):
            if "wide" in parts:
                wide = np.int64 if kind.startswith("s") else np.uint64
                made = values[0].astype(wide) * values[1].astype(wide)
                return made
            made = values[0] * values[1]
            return made + values[2] if name == "mad" else made
        if name == "fma":
            return (values[0].astype(np.float64) * values[1] + values[2]).astype(np.float32)
        if name in ("and", "shl", "shr"):
            operation = {"and": np.bitwise_and, "shl": np.left_shift, "shr": np.right_shift}
            return operation[name](values[0], values[1])
        if name in ("max", "min"):
            return (np.maximum if name == "max" else np.minimum)(values[0], values[1])
        if name == "bfe":
            return values[0] >> values[1] & ((1 << values[2]) - 1).astype(np.uint32)
        if name == "rem":
            return values[0] % values[1]
        if name == "abs":
            return np.abs(values[0])
        raise AssertionError(f"{name} is not known")

    def convert(self, parts, operands):
        target, source = parts[-2], parts[-1]
        values = self.read(operands[1], source)
        if target == "f32":
            return values.astype(np.float32)
        return values.astype({"u32": np.uint32, "s64": np.int64, "u64": np.uint64, "s32": np.int32}[target])

    def reach_shared(self, parts, operands, active):
        to, kind = operands if parts[0] == "ld" else operands[::-1], parts[-1]
        names, place = re.findall(r"\w+", to[0]), to[1].strip("[]").partition("+")
        address = self.read(place[0], "u32").astype(np.int64) + int(place[2] or "0")
        assert kind == "f32" and len(np.unique(address // SHARED_AT)) == 1
        assert not (address % (4 * len(names))).any()
        memory = list(SHARED.values())[int(address[0]) // SHARED_AT - 1].view(np.float32)
        index = address % SHARED_AT // 4
        for number, name in enumerate(names):
            if parts[0] == "ld":
                inside = np.where(active, index + number, 0)
                self.write(name, memory[inside], active)
            else:
                assert len(np.unique(index[active])) == active.sum(), "two threads write one number"
                memory[(index + number)[active]] = self.read(name, kind)[active]

    def reach(self, parts, operands, active):
        kind = parts[-1]
        size = int(kind[1:]) // 8
        if parts[0] == "red":
            assert kind == "f32"
            names = re.findall(r"\w+", operands[1])
            addresses = self.address(operands[0])[active]
            assert not (addresses % (size * len(names))).any(), "misaligned"
            for number, name in enumerate(names if active.any() else ()):
                self.memory.add(addresses + np.uint64(size * number), self.read(name, kind)[active])
            return
        count = next((int(part[1]) for part in parts if part in ("v2", "v4")), 1)
        names = re.findall(r"\w+", operands[0]) if count > 1 else [operands[0]]
        if not active.any():
            for name in names:
                self.registers.setdefault(name, np.zeros(self.count, np.uint64))
            return
        raw = self.memory.load(self.address(operands[1]), size * count)
        for number, name in enumerate(names):
            piece = np.ascontiguousarray(raw[:, number * size : (number + 1) * size])
            self.write(name, piece.view(UNSIGNED[size * 8])[:, 0], active)


class HostMemory(Memory):
    """The memory of this process, by real addresses."""

    def load(self, addresses, size):
        different, places = np.unique(addresses, return_inverse=True)
        read = b"".join(ctypes.string_at(at, size) for at in different.tolist())
        return np.frombuffer(read, np.uint8).reshape(-1, size)[places]

    def add(self, addresses, values):
        for address, value in zip(addresses, values, strict=True):
            ctypes.c_float.from_address(int(address)).value += float(value)


def places(threads, entry):
    """Row and column of entry number `entry` of each thread in a block that a Hopper product leaves."""
    thread = np.arange(threads)
    row = 16 * (thread // 32) + thread // 4 % 8 + 8 * (entry // 2 % 2)
    return row, 8 * (entry // 4) + 2 * (thread % 4) + entry % 2


def run_inline(text, values, pack):
    """Computes `inline_asm_elementwise` of arrays in float32; zeros if the assembly returns nothing.

    The first of `values` is a product, or has a number for each thread; the others are broadcast to it.
    """
    shape = values[0].shape
    threads = Threads(math.prod(shape) // pack, HostMemory())
    spread = places if len(shape) == 2 else lambda threads, entry: np.arange(threads)
    for number, value in enumerate(values):
        block = np.broadcast_to(value, shape)
        for entry in range(pack if number == 0 else 1):
            part = np.ascontiguousarray(block[spread(threads.count, entry)])
            threads.registers[f"operand{pack * (1 + number) + entry}"] = bits(part)
    threads.run(re.sub(r"\$(\d+)", r"operand\1", text))
    out = np.zeros(shape, np.float32)
    for entry in range(pack if len(shape) == 2 else 0):
        raw = threads.registers[f"operand{entry}"].astype(np.uint32)
        out[spread(threads.count, entry)] = raw.view(np.float32)
    return out
