"""`hstu_attention` against loops over queries and keys, and the properties that a model relies on."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention, last_backend
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention import reference
from tests.ops import oracle
from tests.ops.cases import MASKS, layout_of, qkv, relative_bias, samples, times
from tests.ops.oracle import Sample

BACKENDS = ("reference",)
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64, sums in another order


def gradients(out, inputs, seed=0):
    """Gradients for random cotangents: ones would hide what is wrong for single tokens."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mask", "contextual"),
    [(mask, (0, 1, 3)[(i // 4 + i) % 3]) for i, mask in enumerate(MASKS)],
    ids=str,
)
def test_output_and_all_gradients_equal_the_loops(mask, contextual, backend):
    """All masks, and each pair of a setting of the mask and a number of contextual tokens."""
    batch = samples(contextual)
    layout = layout_of(batch)
    inputs = qkv(layout.total_len, dim=3, v_dim=2)
    bias = relative_bias(layout.total_len, rows=[None, 2][contextual % 2])
    leaves = [*inputs, bias.position_table, bias.time_table]
    out = hstu_attention(*inputs, layout, mask, scale_len=7, bias=bias, backend=backend)
    assert last_backend("hstu_attention") == backend
    expected = oracle.hstu(*inputs, batch, mask, 3**-0.5, 7, bias)
    torch.testing.assert_close(out, expected, **EXACT)
    for got, want in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dim", "v_dim"), [(3, 5), (5, 3), (1, 1)])
@pytest.mark.parametrize("alpha", [None, 0.0, -0.7])
def test_without_bias_for_other_dimensions_and_alphas(alpha, dim, v_dim, backend):
    batch = samples(1)
    layout = layout_of(batch)
    inputs = qkv(layout.total_len, heads=1, dim=dim, v_dim=v_dim)
    out = hstu_attention(*inputs, layout, alpha=alpha, scale_len=2.5, backend=backend)
    expected = oracle.hstu(*inputs, batch, AttentionMask(), dim**-0.5 if alpha is None else alpha, 2.5)
    torch.testing.assert_close(out, expected, **EXACT)
    for got, want in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_samples_without_targets_equal_the_loops(window, reads, contextual, backend):
    """One mask and one table of distances serve all such samples, unless contextual tokens read histories."""
    batch = samples(contextual, [(5, 0), (0, 0), (1, 0), (7, 0)])
    layout = layout_of(batch)
    inputs, bias = qkv(layout.total_len), relative_bias(layout.total_len, rows=2)
    leaves = [*inputs, bias.position_table, bias.time_table]
    mask = AttentionMask(window, contextual_reads_history=reads)
    out = hstu_attention(*inputs, layout, mask, scale_len=7, bias=bias, backend=backend)
    expected = oracle.hstu(*inputs, batch, mask, 3**-0.5, 7, bias)
    torch.testing.assert_close(out, expected, **EXACT)
    for got, want in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("rows", [None, 2])
def test_gradients_are_those_of_finite_differences(rows):
    batch = [Sample(1, 3, 2), Sample(1, 0, 1)]
    layout = layout_of(batch)
    bias = relative_bias(layout.total_len, rows=rows)

    def attend(q, k, v, position_table, time_table):
        tables = RelativeBias(position_table, time_table, bias.timestamps, bias.next_timestamps)
        return hstu_attention(q, k, v, layout, AttentionMask(target_group_size=2), scale_len=3, bias=tables)

    inputs = qkv(layout.total_len)
    assert torch.autograd.gradcheck(attend, (*inputs, bias.position_table, bias.time_table))


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
    bias = relative_bias(layout.total_len, rows=None) if data.draw(st.booleans(), "bias") else None
    out = hstu_attention(*inputs, layout, mask, scale_len=4, bias=bias)
    torch.testing.assert_close(out, oracle.hstu(*inputs, batch, mask, 3**-0.5, 4, bias), **EXACT)


def test_a_batch_without_tokens_gives_zero_gradients():
    layout = SequenceLayout(torch.tensor([0, 0]))
    inputs, bias = qkv(0), relative_bias(0, rows=2)
    out = hstu_attention(*inputs, layout, scale_len=4, bias=bias)
    assert out.shape == (0, 2, 2)
    for gradient in gradients(out, [*inputs, bias.position_table, bias.time_table]):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_float64(dtype):
    layout = layout_of(samples(1, [(60, 5), (3, 1), (33, 0)]))
    inputs, bias = qkv(layout.total_len, dim=16, v_dim=16), relative_bias(layout.total_len, rows=None)
    exact = hstu_attention(*inputs, layout, scale_len=64, bias=bias)
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    out = hstu_attention(*rounded, layout, scale_len=64, bias=bias)
    assert out.dtype == dtype
    error = (out.double() - exact).norm() / exact.norm()
    assert error < 8 * torch.finfo(dtype).eps
    pairs = zip(gradients(out, rounded), gradients(exact, inputs), strict=True)
    assert all((a.double() - b).norm() / b.norm() < 8 * torch.finfo(dtype).eps for a, b in pairs)


def test_a_sample_does_not_depend_on_its_batch_mates():
    mates = samples(2, [(40, 3), (0, 1), (7, 2), (100, 0), (7, 5)])
    layout = layout_of(mates)
    inputs = qkv(layout.total_len, dtype=torch.float32)
    bias = relative_bias(layout.total_len, rows=2)
    mask = AttentionMask(window=5, prefix=1, target_group_size=2)
    out = hstu_attention(*inputs, layout, mask, scale_len=128, bias=bias)
    for sample, start, end in zip(mates, layout.offsets.tolist(), layout.offsets.tolist()[1:], strict=False):
        alone = RelativeBias(
            bias.position_table, bias.time_table, bias.timestamps[start:end], bias.next_timestamps[start:end]
        )
        own = [tensor[start:end] for tensor in inputs]
        expected = hstu_attention(*own, layout_of([sample]), mask, scale_len=128, bias=alone)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-5, atol=1e-6)


def test_a_sample_with_nan_spoils_no_other():
    layout = layout_of(samples(0, [(4, 1), (9, 0), (5, 2)]))
    inputs = [tensor.detach().clone() for tensor in qkv(layout.total_len)]
    clean = hstu_attention(*inputs, layout, scale_len=8)
    for tensor in inputs:
        tensor[5:14] = float("nan")
    out = hstu_attention(*inputs, layout, scale_len=8)
    assert torch.equal(out[:5], clean[:5]) and torch.equal(out[14:], clean[14:])
    assert out[5:14].isnan().all()


@pytest.mark.parametrize("group", [1, 2])
def test_candidates_may_be_permuted_and_removed(group):
    """Also with relative bias: a candidate group stands behind the history, wherever it is listed."""
    before, num_groups = 6, 3
    layout = layout_of([Sample(2, 4, num_groups * group)])
    inputs = [tensor.detach() for tensor in qkv(layout.total_len)]
    bias = relative_bias(layout.total_len, rows=2)
    mask = AttentionMask(target_group_size=group)
    out = hstu_attention(*inputs, layout, mask, scale_len=8, bias=bias)
    for groups in ([2, 0, 1], [1], [2, 1]):
        targets = torch.tensor([before + g * group + place for g in groups for place in range(group)])
        rows = torch.cat([torch.arange(before), targets])
        moved = RelativeBias(
            bias.position_table, bias.time_table, bias.timestamps[rows], bias.next_timestamps[rows]
        )
        fewer = layout_of([Sample(2, 4, len(targets))])
        again = hstu_attention(*(t[rows] for t in inputs), fewer, mask, scale_len=8, bias=moved)
        torch.testing.assert_close(again, out[rows], **EXACT)


def test_the_future_does_not_reach_the_past_in_two_layers():
    layout = layout_of([Sample(2, 6, 0)])
    mask = AttentionMask(contextual_reads_history=False)
    x = qkv(8, dim=4, v_dim=4)[0].detach()

    def two_layers(x, mask):
        for _ in range(2):
            x = hstu_attention(x, x, x, layout, mask, scale_len=8)
        return x

    moved = x.clone()
    moved[7] += 1
    assert torch.equal(two_layers(x, mask)[2:7], two_layers(moved, mask)[2:7])
    assert not torch.equal(two_layers(x, AttentionMask())[2:7], two_layers(moved, AttentionMask())[2:7])


def test_views_of_one_projection_are_taken_as_they_are():
    layout = layout_of(samples(1))
    joint = torch.randn(layout.total_len, 2, 8, dtype=torch.float64)
    q, k, v = joint.split([3, 3, 2], dim=2)
    out = hstu_attention(q, k, v, layout, scale_len=8)
    expected = hstu_attention(q.contiguous(), k.contiguous(), v.contiguous(), layout, scale_len=8)
    assert torch.equal(out, expected)


def test_scores_as_large_as_they_get_are_masked_and_finite():
    """The mask must hide a key however well it matches, and SiLU must not overflow far from zero."""
    layout = layout_of([Sample(0, 2, 0)])
    q = torch.full((2, 1, 1), 3e4, requires_grad=True)
    k = torch.tensor([-1.0, 1e15]).view(2, 1, 1).requires_grad_()
    v = torch.ones(2, 1, 1, requires_grad=True)
    out = hstu_attention(q, k, v, layout, alpha=1.0, scale_len=1)
    assert out[0].item() == 0.0 and out[1].item() == pytest.approx(3e19)
    q_gradient, k_gradient, v_gradient = torch.autograd.grad(out[0], (q, k, v))
    assert not q_gradient.any() and not k_gradient.any() and not v_gradient.any()


def test_the_reference_owns_up_to_atomics(monkeypatch):
    facts = AttentionFacts(
        device="cuda",
        dtype=torch.float32,
        num_heads=1,
        qk_dim=2,
        v_dim=2,
        mask=AttentionMask(),
        has_bias=True,
        needs_grad=True,
        deterministic=True,
    )
    assert "use_deterministic_algorithms" in reference.supports(facts).reason
    for field, value in (
        ("device", "cpu"),
        ("has_bias", False),
        ("needs_grad", False),
        ("deterministic", False),
    ):
        assert reference.supports(dataclasses.replace(facts, **{field: value})).ok
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert reference.supports(facts).ok


def arguments(**changes):
    layout = SequenceLayout(torch.tensor([3, 2]))
    given = {
        "q": torch.zeros(5, 2, 3),
        "k": torch.zeros(5, 2, 3),
        "v": torch.zeros(5, 2, 4),
        "layout": layout,
    }
    return given | {"scale_len": 8} | changes


def bias_with(**changes):
    fields = {"position_table": torch.zeros(4), "time_table": torch.zeros(4)}
    fields |= dict(zip(("timestamps", "next_timestamps"), times(5), strict=True))
    return RelativeBias(**(fields | changes))


WRONG = [
    ({"q": torch.zeros(5, 6)}, ValueError, r"q must have shape \[total_len, heads, dim\], got \(5, 6\)"),
    (
        {"q": torch.zeros(5, 2, 3, dtype=torch.int64)},
        TypeError,
        "q must be a floating point tensor, got a tensor",
    ),
    ({"q": [1.0]}, TypeError, "q must be a floating point tensor, got list"),
    ({"k": torch.zeros(5, 2, 3).double()}, TypeError, "k must have the dtype of q, torch.float32"),
    ({"k": torch.zeros(4, 2, 3)}, ValueError, "k has 4 rows, the layout total_len = 5"),
    ({"k": torch.zeros(5, 2, 4)}, ValueError, "k must have the head dimension of q, 3, got 4"),
    ({"v": torch.zeros(5, 1, 4)}, ValueError, "v must have the heads of q, 2, got 1"),
    ({"v": torch.zeros(5, 2, 0)}, ValueError, "v must have at least one head and one dimension"),
    ({"v": torch.zeros(5, 2, 4, device="meta")}, ValueError, "v is on meta, the layout on cpu"),
    ({"layout": torch.tensor([3, 2])}, TypeError, "layout must be a SequenceLayout, got Tensor"),
    ({"mask": None}, TypeError, "mask must be an AttentionMask, got NoneType"),
    ({"scale_len": 0}, ValueError, "scale_len must be positive and finite, got 0"),
    ({"scale_len": torch.tensor(3)}, TypeError, "scale_len must be a number, got Tensor"),
    ({"alpha": float("nan")}, ValueError, "alpha must be finite, got nan"),
    ({"alpha": "auto"}, TypeError, "alpha must be a number, got str"),
    ({"bias": torch.zeros(5, 5)}, TypeError, "bias must be a RelativeBias or None, got Tensor"),
    (
        {"bias": bias_with(time_table=torch.zeros(3, 4))},
        ValueError,
        "bias.time_table has 3 rows, q has 2 heads",
    ),
    ({"bias": bias_with(timestamps=times(4)[0])}, ValueError, "bias.timestamps has 4 entries, q has 5 rows"),
    (
        {"bias": bias_with(position_table=torch.zeros(4, device="meta"))},
        ValueError,
        "bias.position_table is on meta, q on cpu",
    ),
    (
        {"backend": "cuda"},
        ValueError,
        "hstu_attention has no backend 'cuda'; it has auto, sm90, triton, reference",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        hstu_attention(**arguments(**changes))


def test_the_scale_is_required():
    with pytest.raises(TypeError, match="scale_len"):
        hstu_attention(
            torch.zeros(5, 2, 3), torch.zeros(5, 2, 3), torch.zeros(5, 2, 3), arguments()["layout"]
        )
