"""Log loss, normalised entropy and calibration: clipping, the base rate, and sums beyond float32."""

import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.metrics import Calibration, LogLoss, NormalizedEntropy


def value(metric, predictions: list[float], labels: list[float]) -> float:
    n = len(labels)
    metric.update(
        torch.tensor(predictions), torch.tensor(labels), torch.ones(n), torch.zeros(n, dtype=torch.int64)
    )
    return metric.compute().item()


def test_certain_and_wrong_costs_what_eps_says():
    assert value(LogLoss(pb.LogLoss(eps=1e-4)), [0.0, 1.0], [1.0, 0.0]) == pytest.approx(-math.log(1e-4))
    # 1 - 1e-9 is 1 in float32.
    assert value(LogLoss(pb.LogLoss(eps=1e-9)), [1.0], [0.0]) == pytest.approx(-math.log(1e-9), rel=1e-6)


def test_the_base_rate_as_prediction_has_entropy_one():
    metric = NormalizedEntropy(pb.NormalizedEntropy())
    assert value(metric, [0.25] * 8, [1.0, 0, 0, 0] * 2) == pytest.approx(1)


def test_knowing_nothing_else_is_worse_than_the_base_rate():
    # log 2 over the entropy of 1/4.
    entropy = math.log(4) - 0.75 * math.log(3)
    metric = NormalizedEntropy(pb.NormalizedEntropy())
    assert value(metric, [0.5] * 4, [1.0, 0, 0, 0]) == pytest.approx(math.log(2) / entropy)


def test_calibration_by_hand():
    assert value(Calibration(pb.Calibration()), [0.5, 0.5, 0.5], [1.0, 0.0, 0.0]) == pytest.approx(1.5)


def test_sums_go_on_where_float32_stops():
    # 2^24 + 1 is no float32: a float32 sum of ones stays at 2^24.
    metric = Calibration(pb.Calibration())
    n = 1 << 20
    ones, groups = torch.ones(n), torch.zeros(n, dtype=torch.int64)
    for _ in range(17):
        metric.update(ones, torch.full((n,), 0.5), ones, groups)
    value(metric, [1.0], [0.5])
    assert metric.predicted.item() == 17 * n + 1 and metric.compute().item() == 2


@pytest.mark.parametrize("metric", [(LogLoss, pb.LogLoss), (NormalizedEntropy, pb.NormalizedEntropy)])
@pytest.mark.parametrize("eps", [0.0, 0.5, -1e-7])
def test_eps_lies_between(metric, eps):
    cls, message = metric
    with pytest.raises(ValueError, match="eps: .* must lie between 0 and 0.5"):
        cls(message(eps=eps))
