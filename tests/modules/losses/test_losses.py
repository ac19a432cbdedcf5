"""What holds for every registered ranking loss: type, shape, gradients, rows that do not know each other."""

import pytest
import torch

import recsys.modules.losses  # noqa: F401  (registers)
from recsys import protos as pb
from recsys import registry

LOSSES = {name: c for name, c in registry.registered(pb.Loss).items() if c.cls.kind != "retrieval"}
KINDS = {"binary", "regression"}


@pytest.fixture(params=sorted(LOSSES))
def loss(request):
    component = LOSSES[request.param]
    return component.cls(component.config)


def candidates(count: int, dtype=torch.float64):
    logits = torch.randn(count, dtype=dtype)
    return logits, torch.randint(0, 2, (count,)).to(dtype)


def test_every_loss_names_its_kind():
    assert {c.cls.kind for c in LOSSES.values()} == KINDS
    assert registry.lookup(pb.SoftmaxLoss).kind == "retrieval"


def test_one_loss_a_candidate_in_float32(loss):
    logits, labels = candidates(6, torch.float32)
    assert loss(logits, labels).shape == loss.predict(logits).shape == (6,)
    assert loss(logits.bfloat16(), labels).dtype == loss.predict(logits.bfloat16()).dtype == torch.float32


def test_bfloat16_logits_are_computed_in_float32(loss):
    logits, labels = candidates(20, torch.bfloat16)
    assert torch.equal(loss(logits, labels), loss(logits.float(), labels.float()))


def test_gradient(loss):
    logits, labels = candidates(8)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(loss, (logits, labels))


def test_rows_do_not_know_each_other(loss):
    logits, labels = candidates(9, torch.float32)
    alone = torch.cat([loss(logits[i : i + 1], labels[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(loss(logits, labels), alone)


def test_no_candidates(loss):
    logits = torch.empty(0, requires_grad=True)
    value = loss(logits, torch.empty(0))
    assert value.shape == (0,)
    value.sum().backward()
    assert logits.grad.shape == (0,)


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("logit", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_extreme_logits_stay_finite(loss, logit, label):
    logits = torch.tensor([logit], requires_grad=True)
    value = loss(logits, torch.tensor([label]))
    value.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all() and (value >= 0).all()


def test_predicting_the_label_is_best(loss):
    """The logit with the smallest loss stands for the label: loss and predict agree."""
    logits = torch.linspace(-12, 12, 2401)
    for label in (0.0, 1.0):
        best = logits[loss(logits, torch.full_like(logits, label)).argmin()]
        assert abs(loss.predict(best).item() - label) < 0.01
