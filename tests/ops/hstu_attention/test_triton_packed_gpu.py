"""The bias by inline assembly on Hopper: as near to float64 as the other kernels have to be."""

import itertools

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias
from tests.ops.hstu_attention.test_triton_gpu import assert_near, case, results
from tests.ops.hstu_attention.test_triton_packed_interpret import times_of

pytestmark = pytest.mark.gpu

MASKS = [
    AttentionMask(),
    AttentionMask(130, 70, True, 5),
    AttentionMask(window=40),
    AttentionMask(contextual_reads_history=False, target_group_size=3),
]
SHAPES = [
    [(900, 60), (5, 0), (0, 70), (64, 0)],
    [(63, 1), (1, 1), (300, 0)],
    [(2000, 9)],
    [(0, 0), (128, 64), (1, 0)],
]
KINDS = ["hours", "years", "minutes", "anywhere", "missing", "backward"]


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the assembly is for Hopper")


def check(shapes, contextual, rows, kind, dims, dtype, mask):
    from recsys.ops.hstu_attention import triton_packed_launch

    layout, q, k, v, bias = case(shapes, contextual, *dims, 2, dtype, rows)
    assert triton_packed_launch.is_packed("rows", q, v, bias)
    times = times_of(kind, layout.total_len).cuda()
    tables = bias.position_table, bias.time_table
    bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60]))
    for deterministic in (False, True):
        got = results(layout, q, k, v, bias, mask, "triton", deterministic)
        assert_near(got, (layout, q, k, v, bias), mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_and_gradients(mask, dtype):
    for number, (shapes, contextual, rows) in enumerate(itertools.product(SHAPES, [0, 1, 6], [None, 2])):
        check(shapes, contextual, rows, KINDS[number % len(KINDS)], (64, 64), dtype, mask)


@pytest.mark.parametrize("dims", [(32, 32), (16, 64), (25, 25)], ids=str)
def test_heads_of_other_widths(dims):
    """Without the copy engine, and with less shared memory of Triton's own."""
    for number, shapes in enumerate(SHAPES):
        check(shapes, number % 2, 2, KINDS[number], dims, torch.bfloat16, MASKS[number % 2])


def test_deterministic_means_the_same_bits():
    arguments = case([(900, 60), (5, 0), (2000, 9)], 3, 64, 64, 2, torch.bfloat16, 2)
    first = results(*arguments, AttentionMask(), "triton")
    for _ in range(5):
        again = results(*arguments, AttentionMask(), "triton")
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
