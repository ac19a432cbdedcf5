"""Every registered ranking loss keeps its contract: type, shape, gradients, independent rows."""

import pytest
import torch

import recsys.modules.losses  # noqa: F401  (registers)
from recsys import protos as pb
from recsys.config import registry
from tests.modules.losses.rows import rows_of

LOSSES = {name: c for name, c in registry.registered(pb.Loss).items() if c.cls.kind != "retrieval"}
KINDS = {"binary", "regression"}
LENGTHS = (3, 0, 1, 4)


@pytest.fixture(params=sorted(LOSSES))
def loss(request):
    component = LOSSES[request.param]
    return component.cls(component.config)


def draw(loss, count: int, dtype=torch.float64):
    logits = torch.randn(count, loss.num_logits, dtype=dtype)
    return shaped(loss, logits), torch.randint(0, 2, (count,)).to(dtype)


def shaped(loss, logits: torch.Tensor) -> torch.Tensor:
    return logits.squeeze(1) if loss.num_logits == 1 else logits


def standing_for(loss, logits: torch.Tensor) -> torch.Tensor:
    """Logits [N] as a loss takes them: of two, the second, beside a 0."""
    return logits if loss.num_logits == 1 else torch.stack([torch.zeros_like(logits), logits], 1)


def test_every_loss_names_its_kind():
    assert {c.cls.kind for c in LOSSES.values()} == KINDS
    assert registry.lookup(pb.SoftmaxLoss).kind == "retrieval"


def test_one_loss_a_candidate_in_float32(loss):
    rows = rows_of(*LENGTHS)
    logits, labels = draw(loss, 8, torch.float32)
    assert loss(logits, labels, rows).shape == loss.predict(logits).shape == (8,)
    rounded = logits.bfloat16()
    assert loss(rounded, labels, rows).dtype == loss.predict(rounded).dtype == torch.float32


def test_bfloat16_logits_are_computed_in_float32(loss):
    rows = rows_of(6, 14)
    logits, labels = draw(loss, 20, torch.bfloat16)
    assert torch.equal(loss(logits, labels, rows), loss(logits.float(), labels.float(), rows))


def test_gradient(loss):
    logits, labels = draw(loss, 8)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(loss, (logits, labels, rows_of(*LENGTHS)))


def test_rows_do_not_know_each_other(loss):
    logits, labels = draw(loss, 8, torch.float32)
    parts = zip(logits.split(LENGTHS), labels.split(LENGTHS), LENGTHS, strict=True)
    alone = torch.cat([loss(*part, rows_of(length)) for *part, length in parts])
    torch.testing.assert_close(loss(logits, labels, rows_of(*LENGTHS)), alone)


def test_the_order_of_a_rows_candidates_does_not_matter(loss):
    logits, labels = draw(loss, 8)
    order = torch.tensor([2, 0, 1, 3, 7, 5, 4, 6])
    rows = rows_of(*LENGTHS)
    torch.testing.assert_close(loss(logits[order], labels[order], rows), loss(logits, labels, rows)[order])


@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0)])
def test_no_candidates(loss, lengths):
    logits, labels = draw(loss, 0)
    logits.requires_grad_()
    value = loss(logits, labels, rows_of(*lengths))
    assert value.shape == (0,)
    value.sum().backward()
    assert logits.grad.shape == logits.shape


def test_nothing_waits_for_a_device(loss):
    """Tensors without values: whoever asked for one on the host would fail."""
    logits, labels = (x.to("meta") for x in draw(loss, 8))
    logits.requires_grad_()
    value = loss(logits, labels, rows_of(*LENGTHS).to("meta"))
    value.sum().backward()
    assert value.shape == loss.predict(logits).shape == (8,) and logits.grad.shape == logits.shape


@pytest.mark.parametrize("label", [0.0, 1.0])
@pytest.mark.parametrize("logit", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_extreme_logits_stay_finite(loss, logit, label):
    """A candidate alone, and beside one of the other label with the same logits and with opposite ones."""
    logits = standing_for(loss, torch.tensor([logit, logit, logit, logit, -logit])).requires_grad_()
    labels = torch.tensor([label, label, 1 - label, label, 1 - label])
    value = loss(logits, labels, rows_of(1, 2, 0, 2))
    value.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all() and (value >= 0).all()


def test_predicting_the_label_is_best(loss):
    """The logit with the smallest loss stands for the label: loss and predict agree."""
    logits = standing_for(loss, torch.linspace(-12, 12, 2401))
    rows = rows_of(*[1] * len(logits))
    for label in (0.0, 1.0):
        best = loss(logits, torch.full((len(logits),), label), rows).argmin()
        assert abs(loss.predict(logits)[best].item() - label) < 0.01
