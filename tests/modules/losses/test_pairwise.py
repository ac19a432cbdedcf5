"""Pairwise loss against a loop over pairs of each row in Python floats."""

import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.losses import pairwise
from recsys.modules.losses.binary_cross_entropy import BinaryCrossEntropy
from recsys.modules.losses.mean_squared_error import MeanSquaredError
from recsys.modules.losses.pairwise import PairwiseLoss
from tests.modules.losses.rows import rows_of

LENGTHS = (4, 0, 1, 5, 3, 2)
BINARY = [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1]
GRADED = [3.5, 0, 3.5, 12, 7, 0, 0.5, 100, 0, 0.5, 2, 2, 2, 1, 0.25]


def problem(labels=BINARY, dtype=torch.float64):
    torch.manual_seed(4)
    return 2 * torch.randn(15, dtype=dtype), torch.tensor(labels, dtype=dtype)


def pairs_by_hand(logits, labels, lengths) -> list[float]:
    results, start = [], 0
    for length in lengths:
        row = range(start, start + length)
        for i in row:
            losses = []
            for j in row:
                better, worse = (i, j) if labels[i] > labels[j] else (j, i)
                if labels[i] != labels[j]:
                    losses.append(math.log1p(math.exp(-(logits[better] - logits[worse]).item())))
            results.append(sum(losses) / len(losses) if losses else 0.0)
        start += length
    return results


@pytest.mark.parametrize("labels", [BINARY, GRADED], ids=["binary", "graded"])
def test_pairs(labels):
    logits, labels = problem(labels)
    actual = PairwiseLoss(pb.PairwiseLoss(pointwise_share=0))(logits, labels, rows_of(*LENGTHS))
    expected = torch.tensor(pairs_by_hand(logits, labels, LENGTHS), dtype=torch.float64)
    torch.testing.assert_close(actual, expected)
    # A row of one candidate, and one of equal labels: no pairs.
    assert actual[4] == 0 and not actual[10:13].any()


def test_a_row_pays_its_mean_over_pairs_for_each_candidate():
    logits, labels = torch.randn(5, dtype=torch.float64), torch.tensor([1.0, 0, 0, 1, 0], dtype=torch.float64)
    actual = PairwiseLoss(pb.PairwiseLoss(pointwise_share=0))(logits, labels, rows_of(5))
    pairs = [math.log1p(math.exp((logits[j] - logits[i]).item())) for i in (0, 3) for j in (1, 2, 4)]
    assert actual.sum().item() == pytest.approx(5 * sum(pairs) / len(pairs))


@pytest.mark.parametrize(
    ("part", "plain", "labels"),
    [
        ({"binary_cross_entropy": {"positive_weight": 3}}, BinaryCrossEntropy, BINARY),
        ({"mean_squared_error": {"log1p": True}}, MeanSquaredError, GRADED),
    ],
)
def test_the_candidates_own_loss_has_its_share(part, plain, labels):
    logits, labels = problem(labels)
    (settings,) = part.values()
    pointwise = plain(getattr(pb, plain.__name__)(**settings))
    loss = PairwiseLoss(pb.PairwiseLoss(pointwise_share=0.75, **part))
    pairs = torch.tensor(pairs_by_hand(logits, labels, LENGTHS), dtype=torch.float64)
    expected = 0.75 * pointwise(logits, labels) + 0.25 * pairs
    torch.testing.assert_close(loss(logits, labels, rows_of(*LENGTHS)), expected)
    torch.testing.assert_close(loss.predict(logits), pointwise.predict(logits))
    assert loss.kind == pointwise.kind


@pytest.mark.parametrize("labels", [BINARY, GRADED], ids=["binary", "graded"])
def test_gradient_with_every_kind_of_row(labels):
    logits, labels = problem(labels)
    loss = PairwiseLoss(pb.PairwiseLoss(pointwise_share=0.25))
    assert torch.autograd.gradcheck(lambda z: loss(z, labels, rows_of(*LENGTHS)), logits.requires_grad_())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_without_any_pair_there_is_no_loss():
    logits = torch.randn(4, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        value = PairwiseLoss(pb.PairwiseLoss(pointwise_share=0))(logits, torch.ones(4), rows_of(0, 3, 1))
        value.sum().backward()
    assert torch.equal(value, torch.zeros(4)) and torch.equal(logits.grad, torch.zeros(4))


def test_blocks_change_nothing_but_the_memory(monkeypatch):
    logits, labels = problem()
    loss, upstream = PairwiseLoss(pb.PairwiseLoss()), torch.randn(15, dtype=torch.float64)
    logits.requires_grad_()
    whole = loss(logits, labels, rows_of(*LENGTHS))
    (expected,) = torch.autograd.grad(whole, logits, upstream)
    # 3 candidates against the 5 places of the longest row.
    monkeypatch.setitem(pairwise.BLOCK_PAIRS, "cpu", 15)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        blocks = loss(logits, labels, rows_of(*LENGTHS))
    torch.testing.assert_close(blocks, whole)
    torch.testing.assert_close(torch.autograd.grad(blocks, logits, upstream)[0], expected)
    assert max(saved) <= len(LENGTHS) * max(LENGTHS) < 15 * max(LENGTHS)


def test_share_must_be_one():
    with pytest.raises(ValueError, match="pointwise_share: -0.5 is given; it must be from 0 to 1"):
        PairwiseLoss(pb.PairwiseLoss(pointwise_share=-0.5))
