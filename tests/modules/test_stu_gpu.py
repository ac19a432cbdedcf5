"""The STU layer on a GPU: its fused ops against PyTorch's in the same types; gradients in their places."""

from functools import partial

import pytest
import torch

from recsys.modules.stu import STUConfig, STULayer
from recsys.ops import AttentionMask, GradientBuffer, SequenceLayout, last_backend
from recsys.ops.hstu_attention import Problem
from recsys.ops.hstu_attention import attend as hstu_attend

pytestmark = pytest.mark.gpu

LENGTHS = torch.tensor([300, 1, 0, 77, 130])


def layer_of(width, dim, config, **settings):
    torch.manual_seed(0)
    layer = STULayer(width, num_heads=2, qk_dim=dim, v_dim=dim, config=config, **settings)
    for parameter in layer.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return layer.cuda()


def results(layer, x, backend, fused, bf16=True):
    """Output and all gradients of a step with random cotangents; attention by a backend."""
    layout = SequenceLayout(LENGTHS).to("cuda")
    layer.fused = fused
    problem = Problem(layout, AttentionMask(window=200), (layer.widths[2] // layer.num_heads) ** -0.5, 300.0)
    attend = partial(hstu_attend, problem=problem, backend=backend)
    torch.manual_seed(5)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
        out = layer(x, attend)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]


@pytest.mark.parametrize("gate", ["ugn", "concat"])
@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ["u", "uvqk"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_not_further_from_exact_than_twice_the_layer_of_pytorchs_ops(dim, activation, tokens, gate):
    layer = layer_of(128, dim, STUConfig(activation=activation, gate=gate))
    x = torch.randn(int(LENGTHS.sum()), 128, device="cuda").to(tokens).requires_grad_()
    ours = results(layer, x, "auto", fused=True)
    assert last_backend("norm_linear") == "triton"
    theirs = results(layer, x, "reference", fused=False)
    exact = x.detach().double().requires_grad_()
    want = results(layer.double(), exact, "reference", fused=False, bf16=False)
    for got, reference, right in zip(ours, theirs, want, strict=True):
        allowed = 2 * (reference.double() - right).norm() + 1e-3 * right.norm()
        assert (got.double() - right).norm() <= allowed


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_all_gradients_of_the_projection_are_written_in_their_places(dim, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the Hopper kernels write there")
    places, right = [], GradientBuffer.joined

    def joined(buffer, gradients):
        whole = right(buffer, gradients)
        places.extend(
            whole.data_ptr() <= item.data_ptr() < whole.data_ptr() + whole.nbytes for item in gradients
        )
        return whole

    monkeypatch.setattr(GradientBuffer, "joined", joined)
    x = torch.randn(int(LENGTHS.sum()), 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results(layer_of(128, dim, STUConfig()), x, "sm90", fused=True)
    assert places == [True] * 4


@pytest.mark.parametrize("choice", [("normed_x",), ("uvqk",), ("normed_x", "uvqk", "gated")], ids=" ".join)
def test_recompute_changes_no_gradient(choice):
    layer = layer_of(128, 256, STUConfig(), dropout=0.2)
    x = torch.randn(int(LENGTHS.sum()), 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = results(layer, x, "auto", fused=True)
    layer.recompute = frozenset(choice)
    for got, want in zip(results(layer, x, "auto", fused=True), expected, strict=True):
        if "gated" in choice:
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("activation", ["u", "uvqk"])
@pytest.mark.parametrize("gate", ["ugn", "concat"])
@pytest.mark.parametrize("dim", [64, 256])
def test_some_rows_not_further_from_exact_than_twice_the_layer_of_pytorchs_ops(dim, gate, activation):
    layout = SequenceLayout(LENGTHS, torch.tensor([3, 0, 0, 7, 2])).to("cuda")
    selection = layout.truncate(40)
    layer = layer_of(128, dim, STUConfig(activation=activation, gate=gate))
    x = torch.randn(layout.total_len, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def results_of(x, backend, fused, bf16=True):
        layer.fused = fused
        problem = Problem(layout, AttentionMask(window=90, prefix=10), dim**-0.5, 300.0, tail=40)
        attend = partial(hstu_attend, problem=problem, backend=backend)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            out = layer.forward_rows(x, selection.index, attend)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], cotangent)]

    ours, theirs = results_of(x, "auto", True), results_of(x, "reference", False)
    layer.double()
    want = results_of(x.detach().double().requires_grad_(), "reference", False, bf16=False)
    for got, reference, right in zip(ours, theirs, want, strict=True):
        allowed = 2 * (reference.double() - right).norm() + 1e-3 * right.norm()
        assert (got.double() - right).norm() <= allowed
