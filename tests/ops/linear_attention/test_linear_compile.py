"""The kernels of `linear_attention` compiled for sm_90a and traced, without a GPU. Skips without Triton.

All widths with `--slow`; without, heads of 64 and the largest kernel of 128.
"""

import pytest
import torch

from recsys.ops import SequenceLayout
from tests.ops import harness
from tests.tools.assembled import SHARED_MEMORY, assemble, needs_compiler

pytestmark = needs_compiler

WIDE = ("sums", "chunk_decays", "inverses", "starts", "final", "ends", "end_decays", "local", "grad_starts")
TYPES = dict.fromkeys((*WIDE, "beta", "grad_decay", "grad_beta"), "*fp32")
TYPES |= dict.fromkeys(("chunks", "segments", "segment_offsets"), "*i64")
TYPES |= {"scale": "fp32"}
KERNELS = ("prepare", "states", "local", "out", "state_gradients", "gradients")
QUICK = {("gradients", 128, True)}
CASES = [
    pytest.param(
        kernel, dim, delta, marks=() if dim == 64 or (kernel, dim, delta) in QUICK else pytest.mark.slow
    )
    for kernel in KERNELS
    for dim in (64, 128)
    for delta in (False, True)
    if not (kernel in ("local", "out") and delta)
]


@pytest.mark.parametrize(("kernel", "dim", "delta"), CASES)
def test_it_fits_into_shared_memory_and_nearly_into_the_registers(kernel, dim, delta, tmp_path):
    """Tokens in bfloat16. Gradients of the delta rule spill."""
    from recsys.ops.linear_attention import triton_chunks, triton_ops, triton_scan
    from recsys.ops.linear_attention.chunks import chunk_table_of

    q, layout = torch.empty(10, 4, dim, dtype=torch.bfloat16), SequenceLayout(torch.tensor([10]))
    beta = torch.empty(10, 4) if delta else None
    table = chunk_table_of(layout, triton_ops.CHUNK, 0)
    problem = triton_ops.problem_of((q, q, q, q, beta, torch.empty(1, 4, dim, dim)), table, 1.0, None, False)
    strides = {"STRIDE_V": 4 * dim, "HEAD_V": dim}
    scan = problem.scan_launch()
    function, constants = {
        "prepare": (triton_chunks.prepare_kernel, problem.chunk_constants(**triton_ops.PREPARE_LAUNCH)),
        "states": (triton_scan.states_kernel, problem.scan_constants(LOCAL=False, **strides, **scan)),
        "local": (triton_scan.states_kernel, problem.scan_constants(LOCAL=True, **strides, **scan)),
        "out": (triton_chunks.out_kernel, problem.out_constants() | strides),
        "state_gradients": (triton_scan.state_gradients_kernel, problem.scan_constants(LOCAL=False, **scan)),
        "gradients": (triton_chunks.gradients_kernel, problem.chunk_constants(**triton_ops.GRADIENTS_LAUNCH)),
    }[kernel]
    assembled = assemble(function, TYPES, constants, tmp_path, other="*bf16")
    print(kernel, dim, delta, assembled)
    assert assembled.shared <= SHARED_MEMORY
    assert assembled.spills <= (1600 if delta else 300)


@pytest.mark.parametrize("delta", [False, True])
def test_a_traced_graph_holds_the_kernels(delta):
    """Forward: three kernels by chunk, the scan, and for segments a sum of each and their combination.

    Backward computes the states again, goes back through them and has one kernel by chunk.
    """
    from recsys.ops.linear_attention import triton_ops
    from recsys.ops.linear_attention.chunks import chunk_table

    def both(q, beta, state, lengths, offsets, num_targets):
        table = chunk_table(lengths, offsets, num_targets, q.shape[0], 16, 0 if delta else 2)
        facts = (table, 1.0, torch.library.wrap_triton, not delta)
        sums = triton_ops.decay_sums(q, table, q.dtype, torch.library.wrap_triton)
        problem = triton_ops.problem_of((q, q, q, sums, beta if delta else None, state), *facts)
        out, final, _ = triton_ops.launch_forward(problem)
        return [out, final, *triton_ops.launch_backward(problem, sums.dtype, None, out, final)]

    layout = SequenceLayout(torch.tensor([33, 5]))
    q, beta, state = torch.randn(38, 2, 16), torch.rand(38, 2), torch.randn(2, 2, 16, 16)
    kernels = 4 + 4 if delta else 6 + 8
    facts = (layout.lengths, layout.offsets, layout.num_targets)
    harness.assert_traced(both, q, beta, state, *facts, kernels=kernels)
