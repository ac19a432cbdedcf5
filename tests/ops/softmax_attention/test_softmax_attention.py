"""`softmax_attention` against loops over queries and keys."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import AttentionMask, SequenceLayout, last_backend, softmax_attention
from tests.ops import oracle
from tests.ops.cases import MASKS, layout_of, qkv, samples

BACKENDS = ("reference",)
EXACT = {"rtol": 1e-10, "atol": 1e-11}  # float64, sums in another order


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("mask", MASKS[::3], ids=str)
def test_output_and_gradients_equal_the_loops(mask, contextual, backend):
    batch = samples(contextual)
    layout = layout_of(batch)
    inputs = qkv(layout.total_len, dim=3, v_dim=[2, 3][contextual // 2])
    out = softmax_attention(*inputs, layout, mask, backend=backend)
    assert last_backend("softmax_attention") == backend
    expected = oracle.softmax(*inputs, batch, mask, 3**-0.5)
    torch.testing.assert_close(out, expected, **EXACT)
    cotangent = torch.randn_like(out)
    pairs = zip(*(torch.autograd.grad(o, inputs, cotangent) for o in (out, expected)), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("reads", [True, False])
def test_samples_without_targets_equal_the_loops(reads, contextual):
    """One mask serves all such samples, unless contextual tokens read histories, which differ in length."""
    batch = samples(contextual, [(5, 0), (0, 0), (1, 0), (7, 0)])
    layout = layout_of(batch)
    inputs, mask = qkv(layout.total_len), AttentionMask(contextual_reads_history=reads)
    out = softmax_attention(*inputs, layout, mask)
    torch.testing.assert_close(out, oracle.softmax(*inputs, batch, mask, 3**-0.5), **EXACT)


@pytest.mark.parametrize("alpha", [0.0, -0.7, 2.0])
def test_an_explicit_alpha_is_taken_also_zero(alpha):
    batch = samples(1)
    layout = layout_of(batch)
    inputs = qkv(layout.total_len)
    expected = oracle.softmax(*inputs, batch, AttentionMask(), alpha)
    torch.testing.assert_close(softmax_attention(*inputs, layout, alpha=alpha), expected, **EXACT)


def test_gradients_are_those_of_finite_differences():
    layout = layout_of(samples(1, [(3, 2), (0, 1), (5, 0)]))
    assert torch.autograd.gradcheck(lambda *qkv: softmax_attention(*qkv, layout), qkv(layout.total_len))


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_random_layouts_equal_the_loops(data):
    contextual = data.draw(st.integers(0, 2), "contextual")
    shapes = data.draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=0, max_size=5), "shapes"
    )
    mask = data.draw(st.sampled_from(MASKS), "mask")
    batch = samples(contextual, shapes)
    layout = layout_of(batch)
    inputs = qkv(layout.total_len, heads=1, seed=data.draw(st.integers(0, 99), "seed"))
    out = softmax_attention(*inputs, layout, mask)
    torch.testing.assert_close(out, oracle.softmax(*inputs, batch, mask, 3**-0.5), **EXACT)


def test_padding_and_empty_samples_leave_gradients_finite():
    """Rows of padding see no key: their softmax must not turn into NaN in backward."""
    layout = SequenceLayout(torch.tensor([0, 50, 1, 0, 49]))
    inputs = qkv(100, dtype=torch.float32)
    out = softmax_attention(*inputs, layout, AttentionMask(window=2))
    for gradient in torch.autograd.grad(out.square().sum(), inputs):
        assert gradient.isfinite().all()
    empty = qkv(0)
    assert softmax_attention(*empty, SequenceLayout(torch.tensor([0]))).shape == (0, 2, 2)


def test_a_sample_does_not_depend_on_its_batch_mates():
    mates = samples(1, [(40, 3), (0, 1), (7, 2), (100, 0)])
    layout = layout_of(mates)
    inputs = qkv(layout.total_len, dtype=torch.float32)
    out = softmax_attention(*inputs, layout)
    for sample, start, end in zip(mates, layout.offsets.tolist(), layout.offsets.tolist()[1:], strict=False):
        expected = softmax_attention(*(tensor[start:end] for tensor in inputs), layout_of([sample]))
        torch.testing.assert_close(out[start:end], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(5, 2, 4)}, ValueError, "k must have the head dimension of q, 3, got 4"),
        ({"v": torch.zeros(4, 2, 3)}, ValueError, "v has 4 rows, the layout total_len = 5"),
        ({"alpha": True}, TypeError, "alpha must be a number, got bool"),
        (
            {"backend": "flash"},
            ValueError,
            "softmax_attention has no backend 'flash'; it has auto, reference",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    given = {name: torch.zeros(5, 2, 3) for name in "qkv"} | {"layout": SequenceLayout(torch.tensor([3, 2]))}
    with pytest.raises(error, match=message):
        softmax_attention(**(given | changes))
