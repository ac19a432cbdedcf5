"""The kernels of `norm_linear` compiled for sm_90a, without a GPU: no spills, wide moves.

All widths with `--slow`; without, one. Skips without Triton.
"""

import pytest

from tests.tools.assembled import assemble, needs_compiler

pytestmark = needs_compiler

WIDTHS = [1024, 64, 100, 256, 2048, 4096]


@pytest.mark.parametrize("tokens", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel", "sums_kernel"])
@pytest.mark.parametrize(
    "width", [pytest.param(width, marks=[] if width == 1024 else pytest.mark.slow) for width in WIDTHS]
)
def test_it_fits_into_the_registers_and_moves_16_bytes_at_a_time(width, kernel, tokens, tmp_path):
    """Tokens of a type, float32 parameters."""
    from recsys.ops.norm_linear import triton_kernels, triton_ops
    from recsys.ops.runtime import column_sums

    types = {"weight": "*fp32", "bias": "*fp32", "sums": "*fp32"}
    types |= {"x": tokens, "residual": tokens, "grad_x": tokens}
    if kernel == "sums_kernel":
        function, constants = column_sums.sums_kernel, column_sums.constants_of(width, width)
        types["out"] = "*fp32"
    else:
        function = getattr(triton_kernels, kernel)
        blocks = getattr(triton_ops, kernel.replace("kernel", "blocks"))(width)
        constants = triton_ops._constants(width, 1e-6, blocks)
        constants |= {"STRIDE": width} | ({"STRIDE_R": width} if kernel == "backward_kernel" else {})
    found = assemble(function, types, constants, tmp_path, other="*bf16")
    assert found.spills == 0, found.report
    if width % 8 == 0:
        assert set(found.vectors) <= {64, 128} and found.vectors.count(128) >= 1
