"""The Triton kernels of `linear_logp` compiled for sm_90a, without a GPU: no spills, and matrix instructions.

All widths and types with `--slow`; without, one. Skips without Triton.
"""

import itertools

import pytest
import torch

from recsys.ops.linear_logp.recompute import Operands, OutputGrads, RequestedGrads
from tests.ops import harness
from tests.tools.assembled import SHARED_MEMORY, assemble, needs_compiler

pytestmark = needs_compiler

MATRICES = ("hidden", "weight", "own", "other")
TYPES = {"target": "*i64", "candidate_ids": "*i64", "target_ids": "*i64", "rows": "*i32", "marks": "*u8"}
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
WIDTHS = {torch.bfloat16: (64, 128, 256, 512), torch.float32: (64, 128)}


def operands(width, dtype, *, full):
    """Without rows: with everything optional, or with targets only, which is the loss over a catalogue."""
    matrix, ids = torch.empty(0, width, dtype=dtype), torch.empty(0, dtype=torch.int64)
    scale = torch.ones(1)
    return Operands(matrix, matrix, scale if full else None, scale, ids, *([ids if full else None] * 2))


USUAL = (128, torch.bfloat16, False)
KINDS = [
    pytest.param(*kind, marks=[] if kind == USUAL else pytest.mark.slow)
    for dtype, widths in WIDTHS.items()
    for kind in itertools.product(widths, [dtype], (False, True))
]
"""Width, type, with everything optional."""


@pytest.mark.parametrize("kernel", ["forward", "of hidden", "of weight"])
@pytest.mark.parametrize(("width", "dtype", "full"), KINDS)
def test_it_fits_into_registers_and_shared_memory(width, dtype, full, kernel, tmp_path):
    from recsys.ops.linear_logp import triton_kernels, triton_ops

    given = operands(width, dtype, full=full)
    tables = {
        "forward": triton_ops.FORWARD,
        "of hidden": triton_ops.OF_HIDDEN,
        "of weight": triton_ops.OF_WEIGHT,
    }
    blocks = triton_ops.blocks_of(given, tables[kernel])
    constants, types = triton_ops.constants_of(given, blocks), TYPES | dict.fromkeys(MATRICES, NAMES[dtype])
    if kernel == "of weight":
        types["grad"] = NAMES[dtype]
    if kernel != "forward":
        of_weight = kernel == "of weight"
        constants |= {"OF_WEIGHT": of_weight, "WITH_BIAS": of_weight and full, "WITH_SCALE": False}
    function = getattr(triton_kernels, "forward_kernel" if kernel == "forward" else "backward_kernel")
    found = assemble(function, types, constants, tmp_path, other="*fp32")
    assert found.shared * blocks.programs <= SHARED_MEMORY
    assert found.spills == 0, found.report
    if dtype == torch.bfloat16:
        assert "wgmma" in found.ptx and "cp.async" in found.ptx


def test_a_traced_graph_holds_the_kernels():
    from recsys.ops.linear_logp import launch, triton_ops

    def both(hidden, weight, scale, target):
        given = Operands(hidden, weight, None, scale, target, None, None)
        sums = triton_ops.launch_forward(given, launch.launch_traced)
        requested = RequestedGrads(True, True, False, True)
        grads = triton_ops.launch_backward(given, OutputGrads(*sums), requested, launch.launch_traced)
        return [*sums, grads.hidden, grads.weight]

    hidden, weight = torch.randn(33, 24), torch.randn(50, 24)
    harness.assert_traced(both, hidden, weight, torch.ones(1), torch.arange(33), kernels=4)
