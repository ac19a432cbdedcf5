"""The kernels of `gated_norm` compiled for sm_90a, without a GPU: no spills, wide accesses.

All widths with `--slow`; without, one. Skips without Triton.
"""

import pytest
import torch

from recsys.ops.gated_norm import GateInputs, GateOptions
from tests.ops import harness
from tests.tools.assembled import assemble, needs_compiler

pytestmark = needs_compiler

POINTERS = {"weight": "*fp32", "bias": "*fp32", "sums": "*fp32", "seed": "*i64"}
SHAPES = [(256, 4), (64, 4), (1024, 1), (2048, 1), (4096, 1), (100, 4), (1, 16)]


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize(
    ("width", "groups"),
    [pytest.param(*shape, marks=[] if shape == SHAPES[0] else pytest.mark.slow) for shape in SHAPES],
)
def test_it_fits_into_the_registers_and_moves_16_bytes_at_a_time(width, groups, kernel, concat, tmp_path):
    """Tokens in bfloat16, float32 parameters, dropout."""
    from recsys.ops.gated_norm import triton_kernels, triton_ops

    function, five = getattr(triton_kernels, kernel), concat and kernel == "backward_kernel"
    per_warp = triton_ops.ENTRIES_PER_WARP_OF_FIVE if five else triton_ops.ENTRIES_PER_WARP
    blocks = triton_ops.blocks_of(width, per_warp)
    constants = triton_ops._constants(width * groups, GateOptions(groups, 1e-6, concat, 0.2), blocks)
    constants |= {name: 3 * width * groups for name in function.arg_names if name.startswith("STRIDE_")}
    found = assemble(function, POINTERS, constants, tmp_path, other="*bf16")
    assert found.spills == 0
    if width % 8 == 0:
        assert set(found.vectors) <= {64, 128} and found.vectors.count(128) >= 2


@pytest.mark.parametrize("concat", [True, False])
def test_a_traced_graph_holds_the_kernels(concat):
    from recsys.ops.gated_norm import triton_ops

    options = GateOptions(2, 1e-6, concat, 0.2)

    def both(a, u, weight, bias, seed):
        wrap = torch.library.wrap_triton
        inputs = GateInputs(a, u, weight, bias, seed)
        out = triton_ops.launch_forward(inputs, options, wrap)
        return [out, *triton_ops.launch_backward(out, inputs, options, wrap)]

    a, weight = torch.randn(33, 24, dtype=torch.bfloat16), torch.randn(24)
    harness.assert_traced(both, a, a, weight, weight, torch.tensor([5]), kernels=2)
