"""Triton and Gluon kernels compiled and assembled for sm_90a, without a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from recsys import environment

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that one program may have on Hopper."""

HAS_TRITON = importlib.util.find_spec("triton") is not None
OPTIONS = ("num_warps", "num_stages", "maxnreg")
"""Constants that are options of Triton's compiler."""

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"

needs_compiler = pytest.mark.skipif(
    not HAS_TRITON or IS_INTERPRETER, reason="needs Triton's compiler (pip install triton==3.6.0)"
)
needs_gluon = pytest.mark.skipif(
    IS_INTERPRETER or not (environment.installed_version("triton") or "").startswith("3.6."),
    reason="the kernels are written in the Gluon of Triton 3.6",
)


@dataclass(frozen=True)
class Assembled:
    """A kernel after the compiler and the assembler.

    Attributes:
        ptx: the code for the assembler.
        shared: bytes of shared memory of a program.
        report: what ptxas says.
        cubin: the file with the machine code.
    """

    ptx: str
    shared: int
    report: str
    cubin: Path

    @property
    def spills(self) -> int:
        """Bytes that do not fit into registers: the larger of stores and loads."""
        return max(int(number) for number in re.findall(r"(\d+) bytes spill", self.report))

    @property
    def accesses(self) -> list[int]:
        """Bits of each load and store of global memory."""
        accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", self.ptx)
        return [int(count or 1) * int(width) for count, width in accesses]

    @property
    def vectors(self) -> list[int]:
        """Bits of each load and store of several words of 32 bits."""
        return [32 * int(count) for count in re.findall(r"(?:ld|st)\.global\S*\.v(\d)\.b32", self.ptx)]

    @cached_property
    def sass(self) -> str:
        """The machine code, disassembled."""
        return disassembled(self.cubin)

    @cached_property
    def product_loops(self) -> list[list[str]]:
        """The instructions of each innermost loop with matrix instructions."""
        return [loop for loop in inner_loops(self.sass) if any("HGMMA" in line for line in loop)]

    def check_resources(self, registers: int, spilled: int) -> None:
        """Shared memory suffices, no product waits for the one before it, and few bytes are spilled.

        Args:
            registers: of one thread of each warp group, added up.
            spilled: bytes that may be: numbers of a tile, far from the loops over blocks.
        """
        assert self.shared <= SHARED_MEMORY
        assert "serializ" not in self.report, self.report
        assert registers * 128 <= 65536
        version = environment.version_numbers(environment.tool_version(environment.find_ptxas()))
        assert self.spills <= spilled or version < environment.MINIMAL_PTXAS, self.report


def assemble(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], folder: Path, **rest
) -> Assembled:
    """Compiles a kernel as `compile_kernel` does, and assembles it."""
    return assembled(compile_kernel(kernel, types, constants, folder, **rest), folder)


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    folder: Path,
    *,
    other: str = "*i64",
    boxes: dict[str, tuple[int, ...]] | None = None,
    capability: int = 90,
    to_ptx: bool = True,
) -> Any:
    """Compiles a kernel for aligned tensors.

    Args:
        types: types of parameters, such as `*fp32`. Those that are not named are `other`, or `i32` where the
            kernel is not specialised on them. Strides of type `i32` are multiples of 16.
        constants: compile-time ones; those that are options of the compiler among them.
        boxes: shapes of the blocks that descriptors of bfloat16 tensors show, for kernels in Gluon.
        to_ptx: whether to go on behind the compiler's own language of layouts, which takes half of the time.
    """
    from triton.compiler import ASTSource

    options = {"num_warps": 4} | {name: constants[name] for name in OPTIONS if name in constants}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source_of = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_of

        types = types | {name: descriptor_type("bf16", shape) for name, shape in (boxes or {}).items()}
    signature, aligned = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = types.get(name, "i32" if parameter.do_not_specialize else other)
        if signature[name].startswith("*") or (signature[name] == "i32" and name.startswith("stride")):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = source_of(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return compile_to_ptx(source, options, folder, capability, to_ptx)


def descriptor_type(dtype: str, shape: tuple[int, ...]) -> str:
    """The type of a descriptor of a kernel in Gluon, `bf16` or `fp32`."""
    from triton.experimental.gluon import language as gl

    bits = int(dtype[-2:])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(shape))
    return f"tensordesc<{dtype}[{','.join(map(str, shape))}],{layout!r}>"


def compile_to_ptx(
    source: Any, options: dict[str, Any], folder: Path, capability: int = 90, to_ptx: bool = True
) -> Any:
    """Triton's compiled kernel without machine code: the assembler takes longest, and `assembled` runs it."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    environment.prefer_packaged_ptxas()
    fresh_cache = mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache"))
    left_out = {"make_cubin": lambda *_: b""}
    if not to_ptx:
        left_out |= {"make_llir": _nothing, "make_ptx": _nothing}
    with fresh_cache, mock.patch.multiple(CUDABackend, **left_out):
        return triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _nothing(backend: Any, source: Any, metadata: dict[str, Any], *_: Any) -> str:
    metadata |= {"name": "nothing", "shared": 0}
    return ""


def assembled(compiled: Any, folder: Path, target: str = "sm_90a") -> Assembled:
    """Assembles the PTX of a compiled kernel."""
    ptx, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    ptx.write_text(compiled.asm["ptx"])
    command = [environment.find_ptxas(), "-v", f"--gpu-name={target}", str(ptx), "-o", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Assembled(compiled.asm["ptx"], compiled.metadata.shared, report, cubin)


def disassembled(cubin: Path) -> str:
    """The instructions in a file of machine code, by the disassembler that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [tool, "--print-code", "--no-dataflow", cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def inner_loops(sass: str) -> list[list[str]]:
    """The instructions of each loop that has none in it."""
    program, labels = [], {}
    for line in sass.split("\n"):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(program)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            program.append(instruction.group(1))
    jumps = []
    for i, instruction in enumerate(program):
        if target := re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction):
            jumps.append((labels[target.group(1)], i))
    # The cold second half of a wait is at the end of the program and jumps back over everything: no loop.
    back = [(start, end) for start, end in jumps if start <= end and end - start < 2500]
    return [
        program[start : end + 1]
        for start, end in back
        if not any((start, end) != jump and start <= jump[0] and jump[1] <= end for jump in back)
    ]


def opcodes(loop: list[str]) -> list[str]:
    """The operations of instructions, without predicates and operands."""
    return [re.sub(r"^@!?U?P\w+ ", "", line).split()[0] for line in loop]
