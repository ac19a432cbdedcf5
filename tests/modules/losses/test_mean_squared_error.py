"""Squared errors by hand."""

import math

import torch

from recsys import protos as pb
from recsys.modules.losses.mean_squared_error import MeanSquaredError


def test_plain():
    loss = MeanSquaredError(pb.MeanSquaredError())
    logits = torch.tensor([1.0, -2.0, 0.5])
    assert loss(logits, torch.tensor([3.0, -2.0, 0.0])).tolist() == [4.0, 0.0, 0.25]
    assert torch.equal(loss.predict(logits), logits)


def test_log1p_fits_the_logarithm():
    loss = MeanSquaredError(pb.MeanSquaredError(log1p=True))
    seconds = torch.tensor([0.0, math.e - 1, 3600.0])
    expected = torch.tensor([1.0, 0.0, (1 - math.log(3601)) ** 2])
    torch.testing.assert_close(loss(torch.ones(3), seconds), expected, atol=1e-6, rtol=1e-6)


def test_log1p_predicts_in_the_label_s_unit():
    predict = MeanSquaredError(pb.MeanSquaredError(log1p=True)).predict
    torch.testing.assert_close(predict(torch.tensor([math.log(3601), 0.0])), torch.tensor([3600.0, 0.0]))
    # exp(-2) - 1 seconds do not exist.
    assert predict(torch.tensor([-2.0])).item() == 0


def test_small_values_survive_the_logarithm():
    loss = MeanSquaredError(pb.MeanSquaredError(log1p=True))
    torch.testing.assert_close(loss(torch.zeros(1), torch.tensor([1e-6])), torch.tensor([1e-12]))
    torch.testing.assert_close(loss.predict(torch.tensor([1e-6])), torch.tensor([1e-6]))
