"""Rounding of dQ: the order of its columns, rows that lie apart, nothing written past the last row."""

import pytest
import torch

from tests.ops.harness import interpreter_test
from tests.tools.interpreter import interpreted

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GUARD = 777.0


def case(tokens, heads, dim, even_first):
    """Sums, half of them as they should be, memory in which that is rows of a larger tensor."""
    # Their halves have 8 bits: the interpreter cuts off what is more.
    wanted = torch.randint(
        -127, 128, (tokens, heads, dim), generator=torch.Generator().manual_seed(tokens)
    ).float()
    order = ORDER if even_first else range(8)
    sums = wanted[..., [8 * eight + column for eight in range(dim // 8) for column in order]]
    whole = torch.full((tokens + 1, heads * dim + 192), GUARD, dtype=torch.bfloat16)
    rounded = whole[:tokens, 64 : 64 + heads * dim].unflatten(1, (heads, dim))
    return sums.contiguous(), (0.5 * wanted).to(torch.bfloat16), whole, rounded


def check(whole, rounded, wanted):
    assert torch.equal(rounded, wanted)
    rounded.fill_(GUARD)
    assert (whole == GUARD).all()


SHAPES = pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 64), (9, 3, 128), (70, 2, 64)])
ORDERS = pytest.mark.parametrize("even_first", [False, True])


@ORDERS
@SHAPES
def test_without_a_gpu(tokens, heads, dim, even_first):
    from recsys.ops.hstu_attention.hopper.backward import round_to

    sums, wanted, whole, rounded = case(tokens, heads, dim, even_first)
    round_to(rounded, sums, 0.5, even_first=even_first)
    check(whole, rounded, wanted)


@interpreted
@ORDERS
@SHAPES
def test_the_kernel(tokens, heads, dim, even_first):
    from recsys.ops.hstu_attention.hopper.backward import LINE, round_kernel

    sums, wanted, whole, rounded = case(tokens, heads, dim, even_first)
    lines, programs = 16, -(-sums.numel() // (16 * LINE))
    round_kernel[(programs,)](
        sums,
        rounded,
        sums.numel() // LINE,
        0.5,
        IN_ROW=heads * dim // LINE,
        STRIDE=rounded.stride(0),
        LINES=lines,
        LINE=LINE,
        EVEN_FIRST=even_first,
    )
    check(whole, rounded, wanted)


test_the_kernel_in_the_interpreter = interpreter_test(__file__)
