"""JRC against its formulas, summed over the candidates of each row in Python floats."""

import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.losses.binary_cross_entropy import BinaryCrossEntropy
from recsys.modules.losses.jrc import JrcLoss
from tests.modules.losses.rows import rows_of

LENGTHS = (4, 0, 1, 5, 3, 2)
# Mixed, one candidate, one positive, only negatives, only positives.
LABELS = [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1]


def problem(dtype=torch.float64):
    torch.manual_seed(3)
    return 2 * torch.randn(15, 2, dtype=dtype), torch.tensor(LABELS, dtype=dtype)


def by_hand(logits, labels, lengths, share: float, whole_row: bool) -> list[float]:
    results, start = [], 0
    for length in lengths:
        row = [(logits[i].tolist(), int(labels[i])) for i in range(start, start + length)]
        for place, (z, y) in enumerate(row):
            by_class = math.log(math.exp(z[0]) + math.exp(z[1])) - z[y]
            competing = math.exp(z[y])
            for rival, (z_other, y_other) in enumerate(row):
                if rival != place and (whole_row or y_other != y):
                    competing += math.exp(z_other[y])
            results.append(share * by_class + (1 - share) * (math.log(competing) - z[y]))
        start += length
    return results


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rivals", [pb.JrcLoss.OTHER_CLASS, pb.JrcLoss.WHOLE_ROW])
def test_formula(rivals, share):
    logits, labels = problem()
    loss = JrcLoss(pb.JrcLoss(pointwise_share=share, rivals=rivals))
    expected = by_hand(logits, labels, LENGTHS, share, rivals == pb.JrcLoss.WHOLE_ROW)
    actual = loss(logits, labels, rows_of(*LENGTHS))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("rivals", [pb.JrcLoss.OTHER_CLASS, pb.JrcLoss.WHOLE_ROW])
def test_gradient_with_every_kind_of_row(rivals):
    logits, labels = problem()
    loss = JrcLoss(pb.JrcLoss(pointwise_share=0.25, rivals=rivals))
    assert torch.autograd.gradcheck(lambda z: loss(z, labels, rows_of(*LENGTHS)), logits.requires_grad_())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_row_of_one_class_has_nothing_to_order():
    loss = JrcLoss(pb.JrcLoss(pointwise_share=0))
    for label in (0.0, 1.0):
        logits = torch.randn(5, 2, requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            value = loss(logits, torch.full((5,), label), rows_of(3, 0, 1, 1))
            value.sum().backward()
        assert torch.equal(value, torch.zeros(5))
        assert torch.equal(logits.grad, torch.zeros(5, 2))


def test_a_rival_far_below_the_others_still_counts():
    # The other positive's logit must not be what the sum over rivals is scaled by.
    logits = torch.tensor([[0.0, -500.0], [0.0, 500.0], [0.0, -500.0]])
    value = JrcLoss(pb.JrcLoss(pointwise_share=0))(logits, torch.tensor([1.0, 1.0, 0.0]), rows_of(3))
    torch.testing.assert_close(value, torch.tensor([math.log(2), 0.0, math.log(3)]))


def test_all_of_the_share_is_cross_entropy_of_the_difference():
    logits, labels = problem(torch.float32)
    plain = BinaryCrossEntropy(pb.BinaryCrossEntropy())(logits[:, 1] - logits[:, 0], labels)
    actual = JrcLoss(pb.JrcLoss(pointwise_share=1))(logits, labels, rows_of(*LENGTHS))
    torch.testing.assert_close(actual, plain)


def test_predictions_are_probabilities():
    logits = torch.tensor([[1.0, 1.0], [2.0, 2.0 + math.log(3)], [0.0, -1000.0]])
    predictions = JrcLoss(pb.JrcLoss()).predict(logits)
    torch.testing.assert_close(predictions, torch.tensor([0.5, 0.75, 0.0]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (pb.JrcLoss(pointwise_share=1.5), "pointwise_share: 1.5 is given; it must be from 0 to 1"),
        (pb.JrcLoss(rivals=pb.JrcLoss.RIVALS_UNSPECIFIED), "rivals: 0 is given; it must be OTHER_CLASS or"),
    ],
)
def test_bad_settings(config, message):
    with pytest.raises(ValueError, match=message):
        JrcLoss(config)
