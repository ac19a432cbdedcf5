"""The kernels of `norm_linear` and `linear_parts` compiled for sm_90a, without a GPU: no spills, wide moves.

All widths with `--slow`; without, one. Skips without Triton.
"""

import os
import re
import subprocess

import pytest

from recsys import environment

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

WIDTHS = [1024, 64, 100, 256, 2048, 4096]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(function, constants, tokens):
    """A kernel for tokens of a type and float32 parameters."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers = {"weight": "*fp32", "bias": "*fp32", "sums": "*fp32"}
    numbers |= {"x": tokens, "residual": tokens, "grad_x": tokens}
    if function.fn.__name__ == "sums_kernel":
        numbers["out"] = "*fp32"
    num_warps = constants.pop("num_warps")
    signature, aligned = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = "i32" if name.startswith("num_") else numbers.get(name, "*bf16")
        if signature[name].startswith("*"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})


@pytest.mark.parametrize("tokens", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel", "sums_kernel"])
@pytest.mark.parametrize(
    "width", [pytest.param(width, marks=[] if width == 1024 else pytest.mark.slow) for width in WIDTHS]
)
def test_it_fits_into_the_registers_and_moves_16_bytes_at_a_time(width, kernel, tokens, tmp_path):
    from recsys.ops.norm_linear import triton_kernels, triton_ops
    from recsys.ops.runtime import column_sums

    environment.prefer_packaged_ptxas()
    if kernel == "sums_kernel":
        function = column_sums.sums_kernel
        constants = column_sums.constants_of(width, width)
    else:
        function = getattr(triton_kernels, kernel)
        blocks = getattr(triton_ops, kernel.replace("kernel", "blocks"))(width)
        constants = triton_ops._constants(width, 1e-6, blocks)
        constants |= {"STRIDE": width} | ({"STRIDE_R": width} if kernel == "backward_kernel" else {})
    ptx = compiled(function, constants, tokens).asm["ptx"]
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [environment.find_ptxas(), "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "cubin"]
    report = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    if width % 8 == 0:
        moves = re.findall(r"(?:ld|st)\.global\S*\.v(\d)\.b32", ptx)
        assert moves and set(moves) <= {"2", "4"} and moves.count("4") >= 1
