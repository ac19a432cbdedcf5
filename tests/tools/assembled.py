"""Triton kernels compiled for sm_90a, without a GPU."""

import re
import subprocess
from typing import Any, NamedTuple

from recsys import environment


class Assembled(NamedTuple):
    """What the assembler says of a kernel.

    Attributes:
        spills: bytes that do not fit into registers.
        accesses: widths of loads and stores of global memory, in bits.
    """

    spills: int
    accesses: list[int]


def assemble(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], folder) -> Assembled:
    """A kernel for aligned tensors.

    Args:
        pointers: their types, such as `*fp32`; what is not named is `*i64`. Numbers are not specialised on.
        constants: compile-time ones, and `num_warps`.
    """
    from triton import compile as compiled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    num_warps = constants.pop("num_warps", 4)
    signature, aligned = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif parameter.do_not_specialize:
            signature[name] = "i32"
        else:
            signature[name] = pointers.get(name, "*i64")
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    ptx = compiled(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]
    environment.prefer_packaged_ptxas()
    (folder / "kernel.ptx").write_text(ptx)
    command = [environment.find_ptxas(), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "cubin"]
    report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", report))
    found = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    return Assembled(spills, [int(count or 1) * int(width) for count, width in found])
