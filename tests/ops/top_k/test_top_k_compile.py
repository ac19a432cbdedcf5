"""The kernels of `top_k` compiled for sm_90a, without a GPU: no spills, matrix instructions, their order.

All widths and types with `--slow`; without, one. Skips without Triton.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from recsys import environment

triton = pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in the interpreter", allow_module_level=True)

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHARED_MEMORY = 227 * 1024
SPILLED = 8
"""Bytes that may be: a number of a query, which is read once a group."""

LONG = ("removed", "removed_offsets", "best")
WIDTHS = [
    width if width == 128 else pytest.param(width, marks=pytest.mark.slow) for width in (64, 128, 256, 512)
]
TYPES = [
    torch.bfloat16,
    pytest.param(torch.float32, marks=pytest.mark.slow),
    pytest.param(torch.float16, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    environment.prefer_packaged_ptxas()


def arguments_of(function, constants, types):
    """Signature and what is known to be aligned."""
    signature, aligned = {}, {}
    for index, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or name.startswith("stride"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    return {"signature": signature, "constexprs": constants, "attrs": aligned}


def built(source, options, folder: Path):
    """The compiled kernel, what ptxas said of it, and its instructions."""
    from triton.backends.compiler import GPUTarget

    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    ptx.write_text(made.asm["ptx"])
    command = [environment.find_ptxas(), "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    sass = subprocess.run([disassembler, "-c", cubin], capture_output=True, text=True, check=True).stdout
    assert made.metadata.shared <= SHARED_MEMORY
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert max(map(int, spilled.groups())) <= SPILLED, report
    assert "serializ" not in report, report
    return made, sass


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernel", ["measure_kernel", "choose_kernel"])
def test_the_kernels_fit(kernel, width, dtype, tmp_path):
    from triton.compiler import ASTSource

    from recsys.ops.top_k import triton_kernels, triton_launch

    function = getattr(triton_kernels, kernel)
    constants = {"D": width, "BLOCK_D": width, "STEP": triton_launch.STEP, "COPIED": dtype == torch.float32}
    constants |= {"GROUP": triton_launch.BLOCKS[width].group, "K": 16, "CLASSES": triton_launch.CLASSES}
    constants |= {"REMOVED": triton_launch.REMOVED}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    types = dict.fromkeys(("widths", "share", "facts", "queries"), "*fp32")
    types |= dict.fromkeys(LONG, "*i64") | {"maxima": "*i32"} | {"items": f"*{NAMES[dtype]}", "copy": "*fp16"}
    built(
        ASTSource(function, **arguments_of(function, constants, types)),
        {"num_warps": triton_launch.WARPS},
        tmp_path,
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_product_fits(width, tmp_path):
    from triton.compiler import ASTSource

    from recsys.ops.top_k import triton_kernels, triton_launch

    blocks, function = triton_launch.BLOCKS[width], triton_kernels.coarse_kernel
    types = {
        "query_rows": f"tensordesc<bf16[{blocks.queries},{width}]>",
        "item_rows": f"tensordesc<bf16[{blocks.group},{width}]>",
        "maxima": "*i32",
    }
    constants = {"BLOCK_M": blocks.queries, "GROUP": blocks.group}
    source = ASTSource(function, **arguments_of(function, constants, types))
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    _, sass = built(source, options, tmp_path)
    assert "HGMMA" in sass and "UTMALDG.2D" in sass


@pytest.mark.parametrize("dtype", TYPES[::2])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_product_for_hopper_fits_and_its_loops_hold_little_else(width, dtype, tmp_path):
    if not triton.__version__.startswith("3.6."):
        pytest.skip("the kernel is written in the Gluon of Triton 3.6")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from recsys.ops.top_k import sm90_kernel, sm90_launch

    sizes, function = sm90_launch.SIZES[width], sm90_kernel.coarse_kernel
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    name = NAMES[dtype]
    types = {"item_rows": f"tensordesc<{name}[{sizes.group},{width}],{layout!r}>"}
    types |= {"query_rows": f"*{name}", "maxima": "*i32"}
    constants = sm90_launch.constants_of(width, sizes)
    registers = sizes.strips * sizes.computing_registers + sizes.loading_registers
    assert registers * 128 <= 65536
    source = GluonASTSource(function, **arguments_of(function, constants, types))
    _, sass = built(source, {"num_warps": sm90_launch.WARPS}, tmp_path)
    assert sass.count("HGMMA") == sizes.strips * sizes.halves * width // 16
    # One comparison a score, and a few for what threads and rows have in common.
    scores = sizes.strips * sizes.halves * 64 * sizes.group // 128
    assert scores * 0.9 < len(re.findall("FMNMX", sass)) < scores * 1.2
