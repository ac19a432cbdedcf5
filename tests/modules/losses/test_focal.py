"""Focal loss against the formula of its paper in Python floats."""

import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.losses.binary_cross_entropy import BinaryCrossEntropy
from recsys.modules.losses.focal import FocalLoss


def paper(logit: float, label: int, gamma: float, alpha: float | None) -> float:
    p = 1 / (1 + math.exp(-logit))
    p_true = p if label else 1 - p
    weight = 1.0 if alpha is None else alpha if label else 1 - alpha
    return -weight * (1 - p_true) ** gamma * math.log(p_true)


@pytest.mark.parametrize("alpha", [None, 0.25])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_paper(gamma, alpha):
    config = pb.FocalLoss(gamma=gamma)
    if alpha is not None:
        config.alpha = alpha
    logits = [-3.0, -0.5, 0.0, 0.1, 4.0] * 2
    labels = [0] * 5 + [1] * 5
    expected = torch.tensor([paper(z, y, gamma, alpha) for z, y in zip(logits, labels, strict=True)])
    torch.testing.assert_close(
        FocalLoss(config)(torch.tensor(logits), torch.tensor(labels).float()), expected
    )


def test_gamma_zero_is_cross_entropy():
    logits, labels = torch.randn(20), torch.randint(0, 2, (20,)).float()
    plain = BinaryCrossEntropy(pb.BinaryCrossEntropy())(logits, labels)
    torch.testing.assert_close(FocalLoss(pb.FocalLoss(gamma=0))(logits, labels), plain)


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_smoothed_labels_mix_the_losses_of_both_classes(alpha):
    config = pb.FocalLoss(gamma=1.5, label_smoothing=0.3)
    if alpha is not None:
        config.alpha = alpha
    logits = [-3.0, 0.1, 4.0]
    for label in (0, 1):
        expected = torch.tensor(
            [0.85 * paper(z, label, 1.5, alpha) + 0.15 * paper(z, 1 - label, 1.5, alpha) for z in logits]
        )
        actual = FocalLoss(config)(torch.tensor(logits), torch.full((3,), float(label)))
        torch.testing.assert_close(actual, expected)


def test_small_gamma_has_a_gradient_where_the_true_class_is_certain():
    # (1 - p)^0.5 has an infinite slope at p = 1; times log p the slope is 0.
    logits = torch.tensor([150.0, -150.0], requires_grad=True)
    FocalLoss(pb.FocalLoss(gamma=0.5))(logits, torch.tensor([1.0, 0.0])).sum().backward()
    assert torch.equal(logits.grad, torch.zeros(2))


def test_sure_and_wrong_keeps_its_gradient():
    logits = torch.tensor([-50.0], requires_grad=True)
    FocalLoss(pb.FocalLoss())(logits, torch.ones(1)).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([-1.0]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (pb.FocalLoss(gamma=-1), "gamma: -1.0 is given"),
        (pb.FocalLoss(alpha=0), "alpha: 0.0 is given"),
        (pb.FocalLoss(alpha=1.5), "alpha: 1.5 is given"),
        (pb.FocalLoss(label_smoothing=-0.1), "label_smoothing: -0.1 is given"),
    ],
)
def test_bad_settings(config, message):
    with pytest.raises(ValueError, match=message):
        FocalLoss(config)
