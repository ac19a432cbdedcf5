"""What holds for every registered postprocessor, and each one's formula."""

import math

import pytest
import torch

import recsys.modules.postprocessors  # noqa: F401  (registers)
from recsys import protos as pb
from recsys import registry
from recsys.modules.postprocessors import L2NormPostprocessor, LayerNormPostprocessor

POSTPROCESSORS = registry.registered(pb.Postprocessor)


@pytest.fixture(params=sorted(POSTPROCESSORS))
def postprocessor(request):
    component = POSTPROCESSORS[request.param]
    return component.cls(component.config, embedding_dim=6)


def test_shape_and_type_are_kept(postprocessor):
    for dtype in (torch.float32, torch.bfloat16):
        out = postprocessor(torch.randn(5, 6, dtype=dtype))
        assert out.shape == (5, 6) and out.dtype == dtype
    assert postprocessor(torch.randn(0, 6)).shape == (0, 6)


def test_tokens_do_not_know_each_other(postprocessor):
    values = torch.randn(5, 6)
    alone = torch.cat([postprocessor(values[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(postprocessor(values), alone)


def test_gradient(postprocessor):
    values = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(postprocessor.double(), (values,))


def test_a_zero_token_has_finite_output_and_gradient(postprocessor):
    values = torch.zeros(1, 6, requires_grad=True)
    out = postprocessor(values)
    out.backward(torch.randn(1, 6))
    assert torch.equal(out, torch.zeros(1, 6)) and values.grad.isfinite().all()


def test_export_for_any_number_of_tokens(postprocessor):
    shapes = {"values": {0: torch.export.Dim.DYNAMIC}}
    graph = torch.export.export(postprocessor, (torch.randn(4, 6),), dynamic_shapes=shapes).module()
    for n in (1, 9):
        values = torch.randn(n, 6)
        torch.testing.assert_close(graph(values), postprocessor(values))


def test_l2_norm_by_hand():
    norm = L2NormPostprocessor(pb.L2NormPostprocessor(), embedding_dim=2)
    values = torch.tensor([[3.0, 4.0], [0.0, -0.1]])
    torch.testing.assert_close(norm(values), torch.tensor([[0.6, 0.8], [0.0, -1.0]]))


def test_l2_norm_divides_short_tokens_by_eps():
    norm = L2NormPostprocessor(pb.L2NormPostprocessor(eps=0.5), embedding_dim=2)
    torch.testing.assert_close(norm(torch.tensor([[0.06, 0.08]])), torch.tensor([[0.12, 0.16]]))


def test_l2_norm_refuses_to_divide_by_zero():
    with pytest.raises(ValueError, match="eps: 0.0 is given"):
        L2NormPostprocessor(pb.L2NormPostprocessor(eps=0), embedding_dim=2)


def test_layer_norm_by_hand():
    norm = LayerNormPostprocessor(pb.LayerNormPostprocessor(eps=3.0), embedding_dim=2)
    with torch.no_grad():
        norm.norm.weight.copy_(torch.tensor([2.0, 1.0]))
        norm.norm.bias.copy_(torch.tensor([0.0, 10.0]))
    # Mean 4, variance 1: (3 - 4) / sqrt(1 + 3) and (5 - 4) / 2.
    torch.testing.assert_close(norm(torch.tensor([[3.0, 5.0]])), torch.tensor([[-1.0, 10.5]]))


def test_l2_length_is_taken_in_float32():
    norm = L2NormPostprocessor(pb.L2NormPostprocessor(), embedding_dim=300)
    # 300 squares of 1: a bfloat16 sum stops at 256.
    out = norm(torch.ones(1, 300, dtype=torch.bfloat16))
    assert math.isclose(out[0, 0].item(), 1 / math.sqrt(300), rel_tol=4e-3)
