"""What holds for every registered head, and the fusion head's formula."""

import pytest
import torch

import recsys.modules.heads  # noqa: F401  (registers)
from recsys import protos as pb
from recsys import registry
from recsys.modules.heads import FusionHead

HEADS = registry.registered(pb.Head)


@pytest.fixture(params=sorted(HEADS))
def head(request):
    component = HEADS[request.param]
    torch.manual_seed(0)
    return component.cls(component.config, embedding_dim=6, num_outputs=3).eval()


def test_one_logit_a_candidate_and_task(head):
    assert head(torch.randn(5, 6), torch.randn(5, 6)).shape == (5, 3)
    assert head(torch.randn(0, 6), torch.randn(0, 6)).shape == (0, 3)


def test_candidates_do_not_know_each_other(head):
    user, item = torch.randn(5, 6), torch.randn(5, 6)
    alone = torch.cat([head(user[i : i + 1], item[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(head(user, item), alone)


def test_gradient(head):
    user, item = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(head.double(), (user, item))


def test_export_for_any_number_of_candidates(head):
    count = torch.export.Dim.DYNAMIC
    shapes = {"user": {0: count}, "item": {0: count}}
    graph = torch.export.export(head, (torch.randn(4, 6), torch.randn(4, 6)), dynamic_shapes=shapes).module()
    for n in (1, 9):
        user, item = torch.randn(n, 6), torch.randn(n, 6)
        torch.testing.assert_close(graph(user, item), head(user, item))


def test_fusion_multiplies_then_mixes():
    config = pb.FusionHead(mlp=pb.Mlp(hidden=[4]))
    head = FusionHead(config, embedding_dim=6, num_outputs=2).double()
    first, _, last = head.mlp
    user, item = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    hidden = torch.einsum("ne,ne,he->nh", user, item, first.weight) + first.bias
    expected = (hidden * torch.sigmoid(hidden)) @ last.weight.T + last.bias
    torch.testing.assert_close(head(user, item), expected)


def test_fusion_takes_every_field_of_its_mlp():
    config = pb.FusionHead(mlp=pb.Mlp(hidden=[4, 5], layer_norm=True, dropout=0.25))
    head = FusionHead(config, embedding_dim=6, num_outputs=2)
    block = ["Linear", "LayerNorm", "SiLU", "Dropout"]
    assert [type(layer).__name__ for layer in head.mlp] == [*block, *block, "Linear"]
    assert head.mlp[3].p == 0.25 and head.mlp[4].out_features == 5
