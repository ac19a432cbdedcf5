"""Learning-rate factors, computed by hand."""

import math

import pytest
import torch
from google.protobuf import text_format
from torch.optim import lr_scheduler

from recsys import protos as pb
from recsys.training.schedules import factor

CONSTANT = pb.Schedule(constant=pb.ConstantDecay())
LINEAR = pb.Schedule(warmup_steps=4, linear=pb.LinearDecay(final_factor=0.2))
COSINE = pb.Schedule(warmup_steps=1, cosine=pb.CosineDecay(final_factor=0.5))


def curve(config: pb.Schedule, total: int, steps: int | None = None) -> list[float]:
    return [factor(step, config, total) for step in range(steps or total)]


def test_constant():
    assert curve(CONSTANT, 3, 5) == [1.0] * 5


def test_warm_up_then_a_line_that_ends_behind_the_last_step():
    expected = [0.25, 0.5, 0.75, 1.0, 0.84, 0.68, 0.52, 0.36, 0.2]
    assert curve(LINEAR, 8, 9) == pytest.approx(expected)


def test_half_a_cosine():
    expected = [0.5 + 0.25 * (1 + math.cos(math.pi * quarter / 4)) for quarter in range(5)]
    assert curve(COSINE, 4, 5) == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_without_warm_up_the_first_step_has_the_peak_and_the_last_still_trains(decay):
    config = pb.Schedule()
    getattr(config, decay).SetInParent()
    actual = curve(config, 10, 11)
    assert actual[0] == 1 and actual[5] == pytest.approx(0.5) and actual[10] == pytest.approx(0, abs=1e-15)
    assert actual[9] > 0.02
    assert actual == sorted(actual, reverse=True)


@pytest.mark.parametrize("config", [LINEAR, COSINE])
def test_steps_beyond_the_last_keep_the_final_factor(config):
    assert factor(50, config, 8) == factor(8, config, 8)


@pytest.mark.parametrize("total", [1, 2, 3, 4])
def test_a_run_that_ends_within_the_warm_up(total):
    assert curve(LINEAR, total) == [0.25, 0.5, 0.75, 1.0][:total]


def test_a_single_step():
    assert curve(pb.Schedule(cosine=pb.CosineDecay()), 1) == [1.0]


def torch_curve(make, steps: int) -> list[float]:
    """The rates of one of torch's own schedulers, for a peak of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


SAME_AS_TORCH = {
    "step {every_steps: 3 factor: 0.5}": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "polynomial {power: 3}": lambda o: lr_scheduler.PolynomialLR(o, total_iters=12, power=3),
    "cosine_restarts {first_steps: 4}": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "cosine_restarts {first_steps: 2 growth: 3 final_factor: 0.25}": (
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, T_mult=3, eta_min=0.25)
    ),
}


@pytest.mark.parametrize("text", SAME_AS_TORCH)
def test_decays_are_those_of_torch_and_begin_where_the_warm_up_ends(text):
    expected = torch_curve(SAME_AS_TORCH[text], 12)
    assert curve(text_format.Parse(text, pb.Schedule()), 12) == pytest.approx(expected)
    warm = text_format.Parse(f"warmup_steps: 4 {text}", pb.Schedule())
    assert curve(warm, 15) == pytest.approx([0.25, 0.5, 0.75, *expected])


def test_a_polynomial_ends_at_its_final_factor():
    config = pb.Schedule(polynomial=pb.PolynomialDecay(power=2, final_factor=0.2))
    assert curve(config, 4, 6) == pytest.approx([1.0, 0.65, 0.4, 0.25, 0.2, 0.2])


@pytest.mark.parametrize("decay", ["step", "cosine_restarts"])
def test_decays_of_their_own_length_do_not_depend_on_that_of_the_run(decay):
    config = pb.Schedule(
        step=pb.StepDecay(every_steps=3) if decay == "step" else None,
        cosine_restarts=pb.CosineRestarts(first_steps=3, growth=2) if decay != "step" else None,
    )
    assert curve(config, 20) == curve(config, 5, 20)


def test_a_decay_must_be_chosen():
    with pytest.raises(ValueError, match="choose one of constant, linear, cosine"):
        factor(0, pb.Schedule(warmup_steps=3), 10)
