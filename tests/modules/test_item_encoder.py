"""The item tower against its formula in plain operations."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recsys.modules.item_encoder import ItemEncoder
from tests.modules.pipelines import TWO_TOWER, pipeline_of


def encoder(change: str = "") -> ItemEncoder:
    pipeline = pipeline_of(TWO_TOWER, f"model {{ retriever {{ item_encoder {{ {change} }} }} }}")
    made = ItemEncoder(pipeline.model.retriever.item_encoder, pipeline=pipeline)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def items(count: int) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    known = {"catalogue_tags": torch.randn(count, 4), "catalogue_price": torch.randn(count, 1)}
    return torch.randn(count, 8), known


def by_hand(made: ItemEncoder, x: Tensor) -> Tensor:
    first, _, last = made.layers
    hidden = x @ first.weight.T + first.bias
    return (hidden * torch.sigmoid(hidden)) @ last.weight.T + last.bias


@pytest.mark.parametrize("count", [0, 1, 5])
def test_everything_goes_through_the_layers(count):
    made, (vectors, known) = encoder(), items(count)
    assert made.layers[0].weight.shape == (6, 13)
    expected = by_hand(made, torch.cat([vectors, known["catalogue_tags"], known["catalogue_price"]], dim=1))
    torch.testing.assert_close(made(vectors, known), expected)


def test_without_its_embedding_an_item_is_its_features():
    made, (vectors, known) = encoder("own_embedding: false"), items(5)
    expected = by_hand(made, torch.cat([known["catalogue_tags"], known["catalogue_price"]], dim=1))
    torch.testing.assert_close(made(vectors, known), expected)
    assert torch.equal(made(vectors, known), made(torch.zeros_like(vectors), known))


def test_residual_adds_features_to_the_embedding_and_starts_from_it():
    made, (vectors, known) = encoder("residual: true"), items(5)
    expected = vectors + by_hand(made, torch.cat([known["catalogue_tags"], known["catalogue_price"]], dim=1))
    torch.testing.assert_close(made(vectors, known), expected)
    pipeline = pipeline_of(TWO_TOWER, "model { retriever { item_encoder { residual: true } } }")
    new = ItemEncoder(pipeline.model.retriever.item_encoder, pipeline=pipeline)
    assert torch.equal(new(vectors, known), vectors)


def test_flops_are_those_of_the_layers():
    # 13 x 6 and 6 x 8 weights, two operations each.
    assert encoder().flops(7) == 2 * 7 * (13 * 6 + 6 * 8)


def test_one_linear_layer_when_no_layers_are_given():
    pipeline = pipeline_of(TWO_TOWER)
    pipeline.model.retriever.item_encoder.ClearField("mlp")
    made, (vectors, known) = ItemEncoder(pipeline.model.retriever.item_encoder, pipeline=pipeline), items(4)
    joined = torch.cat([vectors, known["catalogue_tags"], known["catalogue_price"]], dim=1)
    torch.testing.assert_close(
        made(vectors, known), F.linear(joined, made.layers[0].weight, made.layers[0].bias)
    )
