"""The kernels of `linear_attention` compiled for sm_90a and traced, without a GPU. Skips without Triton.

All widths with `--slow`; without, heads of 64 and one kernel of 128 with the delta rule, the largest.
"""

import pytest
import torch

from recsys.ops import SequenceLayout
from tests.ops import harness
from tests.tools.assembled import SHARED_MEMORY, assemble, needs_compiler

pytestmark = needs_compiler

WIDE = ("sums", "inverses", "starts", "states", "final", "ends", "end_decays", "local", "answer_grads")
WIDE += ("query_parts", "key_parts", "end_parts", "grad_starts", "first", "decays", "combined", "log_decay")
TYPES = dict.fromkeys(WIDE, "*fp32")
TYPES |= dict.fromkeys(("chunks", "segments", "segment_offsets"), "*i64")
TYPES |= {"num_rows": "i32", "num_chunks": "i32", "scale": "fp32"}
KERNELS = ("scores", "pairs", "out", "states", "local", "backward")
CASES = [
    pytest.param(kernel, dim, delta, marks=[] if dim == 64 or (kernel, delta) == ("backward", True) else slow)
    for slow in [pytest.mark.slow]
    for kernel in KERNELS
    for dim in (64, 128)
    for delta in (False, True)
    if not (kernel == "local" and delta)
]


@pytest.mark.parametrize(("kernel", "dim", "delta"), CASES)
def test_it_fits_into_shared_memory_and_nearly_into_the_registers(kernel, dim, delta, tmp_path):
    """Tokens in bfloat16. Gradients spill a little; a loop that the compiler unrolled spilled 8,000 bytes."""
    from recsys.ops.linear_attention import triton_ops, triton_scan, triton_scores
    from recsys.ops.linear_attention.chunks import chunk_table_of

    q, layout = torch.empty(10, 4, dim, dtype=torch.bfloat16), SequenceLayout(torch.tensor([10]))
    beta = torch.empty(10, 4) if delta else None
    table = chunk_table_of(layout, triton_ops.CHUNK, 0)
    problem = triton_ops._problem(q, q, q, q, beta, torch.empty(1, 4, dim, dim), table, 1.0, None, False)
    by_chunk = {"LEVELS": triton_ops.CHUNK.bit_length() - 1}
    block_v = triton_ops._scan_block_v(dim)
    warps = triton_ops._scan_warps(problem)
    function, constants = {
        "scores": (triton_scores.scores_kernel, problem.constants(block_v, 8, **by_chunk)),
        "pairs": (
            triton_scores.pair_gradients_kernel,
            problem.constants(block_v, 8, **by_chunk, PARTS=-(-dim // block_v)),
        ),
        "backward": (
            triton_scan.backward_kernel,
            problem.constants(block_v, warps, LOCAL=False, num_stages=triton_ops._backward_stages(problem)),
        ),
    }.get(kernel, (triton_scan.forward_kernel, problem.constants(block_v, warps, MODE=kernel)))
    types = TYPES | {"beta": "*fp32", "added_grads": "*fp32" if delta else "*bf16"}
    assembled = assemble(function, types, constants, tmp_path, other="*bf16")
    assert assembled.shared <= SHARED_MEMORY
    assert assembled.spills <= (1600 if kernel in ("pairs", "backward") else 300)


@pytest.mark.parametrize("delta", [False, True])
def test_a_traced_graph_holds_the_kernels(delta):
    """Forward: two kernels by chunk, the scan, and for segments a sum of each and their combination."""
    from recsys.ops.linear_attention import triton_ops
    from recsys.ops.linear_attention.chunks import chunk_table

    def both(q, beta, state, lengths, offsets, num_targets):
        table = chunk_table(lengths, offsets, num_targets, q.shape[0], 16, 0 if delta else 2)
        facts = (table, 1.0, torch.library.wrap_triton, not delta)
        problem = triton_ops._problem(q, q, q, q, beta if delta else None, state, *facts)
        out, final = triton_ops.launch_forward(problem)
        return [out, final, *triton_ops.launch_backward(problem, final, out, final)]

    layout = SequenceLayout(torch.tensor([33, 5]))
    q, beta, state = torch.randn(38, 2, 16), torch.rand(38, 2), torch.randn(2, 2, 16, 16)
    kernels = 3 + 5 if delta else 5 + 9
    facts = (layout.lengths, layout.offsets, layout.num_targets)
    harness.assert_traced(both, q, beta, state, *facts, kernels=kernels)
