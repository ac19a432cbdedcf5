"""Binary cross-entropy against its textbook form in Python floats, and where that form fails."""

import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.losses.binary_cross_entropy import BinaryCrossEntropy


def textbook(logit: float, label: float, weight: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -weight * label * math.log(p) - (1 - label) * math.log(1 - p)


@pytest.mark.parametrize("weight", [1.0, 7.5])
@pytest.mark.parametrize("label", [0.0, 1.0, 0.3])
def test_textbook(weight, label):
    loss = BinaryCrossEntropy(pb.BinaryCrossEntropy(positive_weight=weight))
    logits = [-3.0, -0.5, 0.0, 0.1, 4.0]
    expected = torch.tensor([textbook(z, label, weight) for z in logits])
    torch.testing.assert_close(loss(torch.tensor(logits), torch.full((5,), label)), expected)


def test_positive_weight_is_one_by_default():
    loss = BinaryCrossEntropy(pb.BinaryCrossEntropy())
    torch.testing.assert_close(loss(torch.zeros(1), torch.ones(1)), torch.tensor([math.log(2)]))


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_smoothed_labels(label):
    loss = BinaryCrossEntropy(pb.BinaryCrossEntropy(positive_weight=2, label_smoothing=0.2))
    logits = [-3.0, 0.1, 4.0]
    expected = torch.tensor([textbook(z, 0.9 if label else 0.1, 2.0) for z in logits])
    torch.testing.assert_close(loss(torch.tensor(logits), torch.full((3,), label)), expected)


def test_smoothing_stops_at_its_probability():
    logits = torch.linspace(-6, 6, 1201)
    loss = BinaryCrossEntropy(pb.BinaryCrossEntropy(label_smoothing=0.1))
    best = logits[loss(logits, torch.ones(1201)).argmin()]
    assert torch.sigmoid(best).item() == pytest.approx(0.95, abs=1e-3)


def test_smoothing_must_be_a_share():
    with pytest.raises(ValueError, match="label_smoothing: 1.5 is given; it must be from 0 to 1"):
        BinaryCrossEntropy(pb.BinaryCrossEntropy(label_smoothing=1.5))


def test_confident_logits_keep_their_loss_and_gradient():
    # p = 1 - 2e-9 rounds to 1: log(1 - p) would be -inf, 1 - p would be 0.
    logits = torch.tensor([20.0, 20.0], requires_grad=True)
    value = BinaryCrossEntropy(pb.BinaryCrossEntropy())(logits, torch.tensor([0.0, 1.0]))
    value.sum().backward()
    torch.testing.assert_close(value, torch.tensor([20.0, math.exp(-20)]), rtol=1e-5, atol=0)
    torch.testing.assert_close(logits.grad, torch.tensor([1.0, -math.exp(-20)]), rtol=1e-5, atol=0)


def test_predictions_are_probabilities():
    predictions = BinaryCrossEntropy(pb.BinaryCrossEntropy()).predict(
        torch.tensor([0.0, math.log(3), -1000.0])
    )
    torch.testing.assert_close(predictions, torch.tensor([0.5, 0.75, 0.0]))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
def test_weight_must_be_positive(weight):
    with pytest.raises(ValueError, match="positive_weight: .* must be above 0"):
        BinaryCrossEntropy(pb.BinaryCrossEntropy(positive_weight=weight))
