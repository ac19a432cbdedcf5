"""`softmax_attention` on every backend against loops over queries and keys."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import AttentionMask, SequenceLayout, softmax_attention
from tests.ops import attention, oracle
from tests.ops.cases import MASKS, SHAPES, qkv
from tests.ops.harness import Problem, assert_is, refused


def attend(q, k, v, *, layout, mask, backend, **rest):
    return softmax_attention(q, k, v, layout, mask, backend=backend, **rest)


def by_loops(q, k, v, *, layout, mask, alpha=None):
    alpha = q.shape[2] ** -0.5 if alpha is None else alpha
    return oracle.softmax(q, k, v, attention.samples_of(layout), mask, alpha)


def problem(shapes, contextual=0, mask=attention.CAUSAL, **options) -> Problem:
    given = attention.problem(shapes, contextual, mask, **options)
    options = {name: value for name, value in given.options.items() if name != "scale_len"}
    return dataclasses.replace(given, op="softmax_attention", function=attend, options=options)


def check(*given, **options) -> None:
    """Output and gradients of the reference are those of the loops, which see one sample at a time."""
    assert_is(problem(*given, **options), by_loops, close=1e-10)


@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("mask", MASKS[::3], ids=str)
def test_all_masks(mask, contextual):
    check(SHAPES, contextual, mask, heads=2, dims=(3, 2 + contextual // 2))


@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("reads", [True, False])
def test_samples_without_targets(reads, contextual):
    """One mask serves all such samples, unless contextual tokens read histories, which differ in length."""
    mask = AttentionMask(contextual_reads_history=reads)
    check([(5, 0), (0, 0), (1, 0), (7, 0)], contextual, mask)


@pytest.mark.parametrize("alpha", [0.0, -0.7, 2.0])
def test_an_explicit_alpha_is_taken_also_zero(alpha):
    check(SHAPES, 1, alpha=alpha)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    shapes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=5),
    contextual=st.integers(0, 2),
    mask=st.sampled_from(MASKS),
)
def test_random_layouts(shapes, contextual, mask):
    check(shapes, contextual if shapes else 0, mask)


def test_padding_and_empty_samples_leave_gradients_finite():
    """Rows of padding see no key: their softmax must not turn into NaN in backward."""
    layout = SequenceLayout(torch.tensor([0, 50, 1, 0, 49]))
    inputs = qkv(100, dtype=torch.float32)
    out = softmax_attention(*inputs, layout, AttentionMask(window=2))
    for gradient in torch.autograd.grad(out.square().sum(), inputs):
        assert gradient.isfinite().all()
    empty = qkv(0)
    assert softmax_attention(*empty, SequenceLayout(torch.tensor([0]))).shape == (0, 2, 2)


def arguments(**changes):
    given = {name: torch.zeros(5, 2, 3) for name in "qkv"} | {"layout": SequenceLayout(torch.tensor([3, 2]))}
    return given | changes


WRONG = [
    ({"k": torch.zeros(5, 2, 4)}, ValueError, "k must have the head dimension of q, 3, got 4"),
    ({"v": torch.zeros(4, 2, 3)}, ValueError, "v has 4 rows, the layout total_len = 5"),
    ({"alpha": True}, TypeError, "alpha must be a number, got bool"),
]

test_wrong_arguments_are_named = refused(softmax_attention, arguments, WRONG)
