"""The STU layer made of fused ops against the layer of PyTorch's, in Triton's interpreter."""

import copy
import functools
import itertools
from functools import partial

import pytest
import torch

from recsys.modules import stu_node
from recsys.modules.stu import STUConfig, STULayer
from recsys.ops import AttentionMask, GradientBuffer, last_backend
from recsys.ops.hstu_attention import Problem
from recsys.ops.hstu_attention import attend as hstu_attend
from tests.ops.cases import layout_of, samples
from tests.tools.interpreter import INTERPRETED, interpreted, mend_interpreter, run_interpreted, starts_it

EMBEDDING, HEADS, QK, V = 10, 2, 4, 6
FORMS = [
    ("u", "layer", "ugn"),
    ("u", "group", "concat"),
    ("uvqk", "layer", "concat"),
    ("uvqk", "group", "ugn"),
]
"""Activation, norm and gate: two values of different choices meet in one of the forms."""
SCALED = [(form, form[1] == "group") for form in FORMS] + [(FORMS[0], True), (FORMS[2], True)]
"""Forms, and whether rows have a scale: both meet every choice."""
PARTS = ("normed_x", "uvqk", "gated")
CHOICES = [choice for size in (1, 2, 3) for choice in itertools.combinations(PARTS, size)]


@pytest.fixture(autouse=True)
def in_the_interpreter(monkeypatch):
    """ "auto" takes Triton, as on a GPU; memory that is handed out uninitialised holds NaN."""
    if not INTERPRETED:
        yield
        return
    mend_interpreter(monkeypatch)
    monkeypatch.setattr("recsys.ops.runtime.dispatch.FORCED_BACKEND", "triton")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random_layer(form, **settings):
    torch.manual_seed(0)
    layer = STULayer(EMBEDDING, num_heads=HEADS, qk_dim=QK, v_dim=V, config=STUConfig(*form), **settings)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


class InBuffer(torch.autograd.Function):
    """Attention's stand-in, which writes its gradients into the buffer."""

    @staticmethod
    def forward(ctx, q, k, v, grad_buffer):
        ctx.save_for_backward(q, k, v)
        ctx.grad_buffer = grad_buffer
        return v * q.sum(-1, keepdim=True) * k.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        sums = [part.sum(-1, keepdim=True) for part in (q, k)]
        scores = (grad * v).sum(-1, keepdim=True)
        actual = (scores * sums[1]).expand_as(q), (scores * sums[0]).expand_as(k), grad * sums[0] * sums[1]
        if ctx.grad_buffer is None:
            return (*actual, None)
        places = [ctx.grad_buffer.place(part) for part in (q, k, v)]
        for place, gradient in zip(places, actual, strict=True):
            place.copy_(gradient)
        return (*places, None)


def in_buffer(q, k, v, grad_buffer=None):
    return InBuffer.apply(q, k, v, grad_buffer)


def results(layer, x, attend, fused):
    """Output and gradients; the same random numbers each time."""
    layer.fused = fused
    torch.manual_seed(7)
    out = layer(x, attend)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]


def exact_results(layer, x, attend, monkeypatch):
    """Those of PyTorch's layer in float64."""
    with monkeypatch.context() as patch:
        patch.setattr("recsys.ops.runtime.dispatch.FORCED_BACKEND", "reference")
        return results(copy.deepcopy(layer).double(), x.detach().double().requires_grad_(), attend, False)


@interpreted
@pytest.mark.parametrize(
    ("form", "rows"), [*itertools.product(FORMS, [40]), *itertools.product(FORMS[:1], [0, 1, 2])]
)
def test_output_and_gradients_are_those_of_the_other_layer(form, rows, monkeypatch):
    """As far from float64 as those: how far that is, a norm of few numbers that are nearly equal decides."""
    layer = random_layer(form, dropout=0.3)
    x = torch.randn(rows, EMBEDDING, requires_grad=True)
    got, want = (results(layer, x, in_buffer, fused) for fused in (True, False))
    assert [last_backend(op) for op in ("norm_linear", "gated_norm")] == ["triton"] * 2
    for ours, theirs, exact in zip(got, want, exact_results(layer, x, in_buffer, monkeypatch), strict=True):
        assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-5 * exact.norm()


@interpreted
@pytest.mark.parametrize("form", FORMS)
def test_with_attention_and_stochastic_depth(form):
    layer, layout = random_layer(form), layout_of(samples(contextual=1))
    x = torch.randn(layout.total_len, EMBEDDING, requires_grad=True)
    scale = torch.randint(0, 2, (layout.total_len, 1)) * 1.5

    def attend(q, k, v, grad_buffer=None):
        mask = AttentionMask(window=3)
        problem = Problem(layout, mask, QK**-0.5, 7.0)
        return hstu_attend(q, k, v, problem, "reference", grad_buffer)

    results = []
    for layer.fused in (True, False):
        out = layer(x, attend, scale)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def node_results(layer, x, attend, fused, monkeypatch):
    """`results`, and whether the layer was one node."""
    taken, right = [], stu_node.StuNode.apply
    with monkeypatch.context() as patch:
        patch.setattr(stu_node.StuNode, "apply", lambda *given: taken.append(True) or right(*given))
        return results(layer, x, attend, fused), bool(taken)


@interpreted
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_node_is_the_layer_of_pytorchs_ops(form, monkeypatch):
    layer, layout = random_layer(form, dropout=0.3), layout_of(samples(contextual=1))
    mask = AttentionMask(window=3)
    attend = partial(hstu_attend, problem=Problem(layout, mask, 0.4, 7.0))
    attend_slowly = partial(attend, backend="reference")
    x = torch.randn(layout.total_len, EMBEDDING, requires_grad=True)
    got, buffer = node_results(layer, x, attend, True, monkeypatch)
    want, wanted_buffer = node_results(layer, x, attend_slowly, False, monkeypatch)
    assert buffer and not wanted_buffer
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@interpreted
def test_the_gradients_of_one_node_may_be_made_twice():
    layer, layout = random_layer(FORMS[0]), layout_of(samples(contextual=1))
    layer.fused = True
    x = torch.randn(layout.total_len, EMBEDDING, requires_grad=True)
    for index in (None, layout.truncate(2).index):
        attend = partial(hstu_attend, problem=Problem(layout, AttentionMask(), QK**-0.5, 9.0))
        out = layer(x, attend) if index is None else layer.forward_rows(x, index, attend)
        cotangent = torch.randn_like(out)
        first = [item.clone() for item in torch.autograd.grad(out, [x, *layer.parameters()], cotangent, True)]
        for got, want in zip(
            torch.autograd.grad(out, [x, *layer.parameters()], cotangent), first, strict=True
        ):
            assert torch.equal(got, want)


@interpreted
def test_what_one_node_keeps_is_seen_by_hooks():
    layer, layout = random_layer(FORMS[0]), layout_of(samples(contextual=1))
    layer.fused = True
    attend = partial(hstu_attend, problem=Problem(layout, AttentionMask(), QK**-0.5, 9.0))
    x, seen = torch.randn(layout.total_len, EMBEDDING, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor
    ):
        layer(x, attend)
    widths = [tensor.shape[1:] for tensor in seen if len(tensor) == layout.total_len]
    assert torch.Size([EMBEDDING]) in widths and torch.Size([HEADS, QK]) in widths


def some_results(layer, x, layout, index, narrowed, scaled):
    """Rows of the output and all gradients, with another scale for each row or none."""
    mask = AttentionMask(window=7, prefix=2)
    attend = partial(hstu_attend, problem=Problem(layout, mask, QK**-0.5, 9.0))
    scale = torch.linspace(0.5, 1.5, layout.total_len)[:, None] if scaled else None
    if narrowed:
        out = layer.forward_rows(x, index, attend, scale[index] if scaled else None)
    else:
        out = layer(x, attend, scale)[index]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]


@interpreted
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("form", "scaled"), SCALED, ids=str)
def test_some_rows_are_those_of_pytorchs_whole_layer(form, scaled, fused, monkeypatch):
    if not fused:  # no kernel is tested, and PyTorch's ops are faster than the interpreter
        monkeypatch.setattr("recsys.ops.runtime.dispatch.FORCED_BACKEND", "reference")
    layout = layout_of(samples(2, [(12, 3), (0, 0), (5, 2)]))
    x = torch.randn(layout.total_len, EMBEDDING, generator=torch.Generator().manual_seed(1)).requires_grad_()
    index = layout.truncate(6).index
    layer = random_layer(form)
    layer.fused = fused
    # The rows that nobody reads are zeros in the whole layer's gradients, too.
    got = some_results(layer, x, layout, index, True, scaled)
    layer.fused = False
    monkeypatch.setattr("recsys.ops.runtime.dispatch.FORCED_BACKEND", "reference")
    want = some_results(layer, x, layout, index, False, scaled)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@functools.cache
def results_of_30_rows(form, recompute=()):
    """Output and gradients of the fused layer, the same rows each time."""
    layer = random_layer(form, dropout=0.3)
    layer.recompute = frozenset(recompute)
    x = torch.randn(30, EMBEDDING, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return results(layer, x, in_buffer, fused=True)


@interpreted
@pytest.mark.parametrize(
    ("form", "choice"), [*itertools.product(FORMS[:1], CHOICES), *itertools.product(FORMS[2:3], CHOICES[:3])]
)
def test_recompute_changes_no_gradient(form, choice):
    """No bit changes, unless the recomputed projection replaces that of the fused node."""
    tolerance = 1e-5 if "gated" in choice else 0
    for got, want in zip(results_of_30_rows(form, choice), results_of_30_rows(form), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@interpreted
def test_the_gradients_of_one_buffer_may_be_made_twice():
    layer = random_layer(("u", "layer", "ugn"))
    layer.fused = True
    x = torch.randn(30, EMBEDDING, requires_grad=True)
    out = layer(x, in_buffer)
    cotangent = torch.randn_like(out)
    first = torch.autograd.grad(out, x, cotangent, retain_graph=True)[0].clone()
    assert torch.equal(torch.autograd.grad(out, x, cotangent)[0], first)


def test_a_buffer_joins_what_lies_in_its_place_and_what_does_not():
    joined = torch.randn(5, 9)
    parts = joined.split([2, 3, 4], dim=1)
    expected = [torch.randn_like(part) for part in parts]
    for in_place in itertools.product((True, False), repeat=3):
        grad_buffer = GradientBuffer([2, 3, 4])
        given = []
        for part, value, placed in zip(parts, expected, in_place, strict=True):
            given.append(grad_buffer.place(part).copy_(value) if placed else value)
        whole = grad_buffer.joined(given)
        assert torch.equal(whole, torch.cat(expected, dim=1))
        if in_place[0]:
            assert given[0].data_ptr() == whole.data_ptr()


def test_a_tensor_that_is_no_part_gets_memory_of_its_own():
    grad_buffer = GradientBuffer([2, 3, 4])
    for given in (torch.randn(5, 2), torch.randn(5, 18)[:, :9], torch.randn(9, 5).t()):
        place = grad_buffer.place(given)
        assert place.shape == given.shape and place.is_contiguous()


@starts_it
def test_the_layer_in_the_interpreter():
    run_interpreted(__file__)
