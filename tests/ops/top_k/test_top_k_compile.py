"""The kernels of `top_k` compiled for sm_90a, without a GPU: no spills, matrix instructions.

All widths and types with `--slow`; without, one. Skips without Triton.
"""

import pytest
import torch

from tests.tools.assembled import SHARED_MEMORY, assemble, needs_compiler

pytestmark = needs_compiler

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SPILLED = 8
"""Bytes that may spill: a number of a query, which is read once a group."""

WIDTHS = [
    width if width == 128 else pytest.param(width, marks=pytest.mark.slow) for width in (64, 128, 256, 512)
]
TYPES = [
    torch.bfloat16,
    pytest.param(torch.float32, marks=pytest.mark.slow),
    pytest.param(torch.float16, marks=pytest.mark.slow),
]


def assert_fits(found):
    assert found.shared <= SHARED_MEMORY
    assert found.spills <= SPILLED and "serializ" not in found.report, found.report


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kernel", ["measure_kernel", "choose_kernel"])
def test_the_kernels_fit(kernel, width, dtype, tmp_path):
    from recsys.ops.top_k import triton_kernels, triton_launch

    constants = {"D": width, "BLOCK_D": width, "STEP": triton_launch.STEP, "COPIED": dtype == torch.float32}
    constants |= {"GROUP": triton_launch.BLOCKS[width].group, "K": 16, "CLASSES": triton_launch.CLASSES}
    constants |= {"REMOVED": triton_launch.REMOVED, "num_warps": triton_launch.WARPS}
    types = dict.fromkeys(("widths", "share", "facts", "queries"), "*fp32")
    types |= dict.fromkeys(("removed", "removed_offsets", "best"), "*i64")
    types |= {"maxima": "*i32", "items": f"*{NAMES[dtype]}", "copy": "*fp16"}
    assert_fits(assemble(getattr(triton_kernels, kernel), types, constants, tmp_path, other="i32"))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_product_fits(width, tmp_path):
    from recsys.ops.top_k import triton_kernels, triton_launch

    blocks = triton_launch.BLOCKS[width]
    types = {
        "query_rows": f"tensordesc<bf16[{blocks.queries},{width}]>",
        "item_rows": f"tensordesc<bf16[{blocks.group},{width}]>",
        "maxima": "*i32",
    }
    constants = {"BLOCK_M": blocks.queries, "GROUP": blocks.group}
    constants |= {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    found = assemble(triton_kernels.coarse_kernel, types, constants, tmp_path, other="i32")
    assert_fits(found)
    assert "HGMMA" in found.sass and "UTMALDG.2D" in found.sass
