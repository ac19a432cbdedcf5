"""Every registered head keeps its contract, and the fusion head computes its formula."""

import pytest
import torch

import recsys.modules.heads  # noqa: F401  (registers)
from recsys import protos as pb
from recsys.config import registry
from recsys.modules.heads import FusionHead

HEADS = registry.registered(pb.Head)
OUTPUTS = (1, 2, 1)
"""Logits of each task."""


@pytest.fixture(params=sorted(HEADS))
def component(request):
    return HEADS[request.param]


@pytest.fixture(params=["PRODUCT", "CONCAT"])
def head(request, component):
    config = type(component.config)(input=request.param)
    torch.manual_seed(0)
    return component.cls(config, embedding_dim=6, num_outputs=OUTPUTS).eval()


def test_logits_of_each_candidate_and_task(head):
    assert head(torch.randn(5, 6), torch.randn(5, 6)).shape == (5, 4)
    assert head(torch.randn(0, 6), torch.randn(0, 6)).shape == (0, 4)


def test_candidates_do_not_know_each_other(head):
    user, item = torch.randn(5, 6), torch.randn(5, 6)
    alone = torch.cat([head(user[i : i + 1], item[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(head(user, item), alone)


def test_gradient(head):
    user, item = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(head.double(), (user, item))


def test_every_parameter_gets_a_gradient(head):
    head(torch.randn(9, 6), torch.randn(9, 6)).square().sum().backward()
    assert [name for name, p in head.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_export_for_any_number_of_candidates(head):
    count = torch.export.Dim.DYNAMIC
    shapes = {"user": {0: count}, "item": {0: count}}
    graph = torch.export.export(head, (torch.randn(4, 6), torch.randn(4, 6)), dynamic_shapes=shapes).module()
    for n in (1, 9):
        user, item = torch.randn(n, 6), torch.randn(n, 6)
        torch.testing.assert_close(graph(user, item), head(user, item))


def test_bfloat16_stays_close(head):
    user, item = torch.randn(50, 6), torch.randn(50, 6)
    exact = head(user, item)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = head(user, item)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - exact).norm() < 0.02 * exact.norm()


def test_a_head_must_know_what_it_computes_on(component):
    config = type(component.config)(input=pb.Head.INPUT_UNSPECIFIED)
    with pytest.raises(ValueError, match="input: 0 is given; it must be PRODUCT or CONCAT"):
        component.cls(config, embedding_dim=6, num_outputs=OUTPUTS)


def test_fusion_multiplies_then_mixes():
    config = pb.FusionHead(mlp=pb.Mlp(hidden=[4]))
    head = FusionHead(config, embedding_dim=6, num_outputs=[1, 1]).double()
    first, _, last = head.mlp
    user, item = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    hidden = torch.einsum("ne,ne,he->nh", user, item, first.weight) + first.bias
    expected = (hidden * torch.sigmoid(hidden)) @ last.weight.T + last.bias
    torch.testing.assert_close(head(user, item), expected)


def test_fusion_of_both_vectors_and_their_product():
    head = FusionHead(pb.FusionHead(input="CONCAT"), embedding_dim=6, num_outputs=[2]).double()
    user, item = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    of_user, of_item, of_both = head.mlp[0].weight.split(6, 1)
    expected = user @ of_user.T + item @ of_item.T + torch.einsum("ne,ne,he->nh", user, item, of_both)
    torch.testing.assert_close(head(user, item), expected + head.mlp[0].bias)


def test_fusion_takes_every_field_of_its_mlp():
    config = pb.FusionHead(mlp=pb.Mlp(hidden=[4, 5], layer_norm=True, dropout=0.25))
    head = FusionHead(config, embedding_dim=6, num_outputs=[2])
    block = ["Linear", "LayerNorm", "SiLU", "Dropout"]
    assert [type(layer).__name__ for layer in head.mlp] == [*block, *block, "Linear"]
    assert head.mlp[3].p == 0.25 and head.mlp[4].out_features == 5
