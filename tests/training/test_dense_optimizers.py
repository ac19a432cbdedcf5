"""Every dense optimizer against torch's own or its formula, its groups, and its state over a stop."""

import copy
import logging
import math

import pytest
import torch
from google.protobuf import text_format
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import registry
from recsys.errors import ConfigError
from recsys.training.dense_optimizers import DenseGroup, DenseOptimizer
from recsys.training.optimizers import ScheduledOptimizer, dense_optimizer

RATES = [0.05, 0.1, 0.1 * 5 / 6, 0.1 * 4 / 6, 0.05, 0.1 / 3]
"""Those of `train` below over six steps."""

CHOICES = {
    "adamw": "adamw {lr: 0.1 weight_decay: 0.2}",
    "sgd": "sgd {lr: 0.1 weight_decay: 0.2}",
    "momentum": "sgd {lr: 0.1 momentum: 0.9 nesterov: true weight_decay: 0.2}",
    "adagrad": "adagrad {lr: 0.1 eps: 1e-3 weight_decay: 0.2}",
    "lamb": "lamb {lr: 0.1 weight_decay: 0.2}",
    "muon": "muon {lr: 0.1 momentum: 0.8 weight_decay: 0.2}",
}
STATES = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "sgd": set(),
    "momentum": {"momentum_buffer"},
    "adagrad": {"step", "sum"},
    "lamb": {"step", "exp_avg", "exp_avg_sq"},
}


def train(choice: str) -> pb.Train:
    schedule = pb.Schedule(warmup_steps=2, linear=pb.LinearDecay())
    return pb.Train(dense_optimizer=text_format.Parse(choice, pb.DenseOptimizer()), schedule=schedule)


class Small(nn.Module):
    """Two matrices of a tower, the bias of one, and a table."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 6))
        self.positions = nn.Embedding(5, 3)


@pytest.fixture
def gradients() -> list[dict[str, Tensor]]:
    model = Small()
    return [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(6)]


def move(model: nn.Module, optimizer: ScheduledOptimizer, steps: list[dict[str, Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for gradients in steps:
        optimizer.zero_grad()
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.clone()
        optimizer.step()


def torch_optimizers(model: Small, name: str) -> list[torch.optim.Optimizer]:
    """The same settings, written by hand for torch."""
    matrices = [layer.weight for layer in model.tower]
    others = [model.tower[1].bias, model.positions.weight]
    groups = [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    if name == "adamw":
        return [torch.optim.AdamW(groups)]
    if name == "sgd":
        return [torch.optim.SGD(groups)]
    if name == "momentum":
        return [torch.optim.SGD(groups, momentum=0.9, nesterov=True)]
    if name == "adagrad":
        return [torch.optim.Adagrad(groups, eps=1e-3)]
    muon = torch.optim.Muon(matrices, momentum=0.8, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, weight_decay=0)]


@pytest.mark.parametrize("name", ["adamw", "sgd", "momentum", "adagrad", "muon"])
def test_an_optimizer_moves_as_that_of_torch_with_the_scheduled_rates(name, gradients):
    model = Small()
    expected = copy.deepcopy(model)
    move(model, ScheduledOptimizer(model, train(CHOICES[name]), total_steps=7), gradients)
    optimizers = torch_optimizers(expected, name)
    for rate, step in zip(RATES, gradients, strict=True):
        for parameter_name, parameter in expected.named_parameters():
            parameter.grad = step[parameter_name].clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(parameter_name))


def test_lamb_moves_by_its_formula(gradients):
    """Algorithm 2 of arXiv 1904.00962 in float64; a parameter that is 0 moves as by AdamW."""
    model = Small()
    nn.init.zeros_(model.tower[1].bias)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    move(model, ScheduledOptimizer(model, train(CHOICES["lamb"]), total_steps=7), gradients)
    for name, w in expected.items():
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for t, (rate, step) in enumerate(zip(RATES, gradients, strict=True), start=1):
            g = step[name].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            r = (m / (1 - 0.9**t)) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-6)
            r = r + (0.2 if name.startswith("tower") and w.dim() == 2 else 0.0) * w
            length = math.sqrt(w.square().sum()) or math.sqrt(r.square().sum())
            w = w - rate * length * r / math.sqrt(r.square().sum())
        torch.testing.assert_close(model.get_parameter(name), w.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CHOICES)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name, gradients):
    whole, config = Small(), train(CHOICES[name])
    optimizer = ScheduledOptimizer(whole, config, total_steps=7)
    move(whole, optimizer, gradients[:3])
    saved = {key: value.clone() for key, value in optimizer.tensors().items()}
    resumed = copy.deepcopy(whole)
    move(whole, optimizer, gradients[3:])

    again = ScheduledOptimizer(resumed, config, total_steps=7)
    assert again.tensors().keys() == saved.keys()
    if name in STATES:
        parameters = [key for key, _ in whole.named_parameters()]
        assert saved.keys() == {f"{key}.{state}" for key in parameters for state in STATES[name]}
    for key, value in again.tensors().items():
        assert not value.any(), f"{key} does not begin at 0"
        value.copy_(saved[key])
    again.resume(3)
    move(resumed, again, gradients[3:])
    for key, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(key), parameter), key


def test_muon_keeps_a_momentum_of_matrices_and_adamw_s_state_of_the_rest():
    keys = ScheduledOptimizer(Small(), train(CHOICES["muon"]), total_steps=7).tensors().keys()
    adamw = {f"{name}.{x}" for name in ("tower.1.bias", "positions.weight") for x in STATES["adamw"]}
    assert keys == {"tower.0.weight.momentum_buffer", "tower.1.weight.momentum_buffer"} | adamw


@pytest.mark.parametrize("layer", [nn.Linear(2, 2, bias=False), nn.Embedding(2, 2)])
def test_muon_trains_models_of_matrices_only_and_without_any(layer):
    before = layer.weight.detach().clone()
    move(layer, ScheduledOptimizer(layer, train(CHOICES["muon"]), 7), [{"weight": torch.ones(2, 2)}])
    assert not torch.equal(layer.weight, before)


def test_groups_scale_the_rate_and_decay_their_parameters(gradients, caplog):
    """With SGD a step is rate x (gradient + decay x weight); the first group that fits a name counts."""
    model = nn.ModuleDict({"model": Small()})
    before = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    config = train(
        """sgd {lr: 0.1 weight_decay: 0.2}
        groups {parameters: "tower.1.*" lr_scale: 0.5}
        groups {parameters: ["positions.*", "*.bias"] lr_scale: 2 weight_decay: 0.3}"""
    )
    with caplog.at_level(logging.INFO, "recsys"):
        optimizer = ScheduledOptimizer(model, config, total_steps=7)
    assert caplog.messages == [
        "train.dense_optimizer.groups[0] trains 2 parameters: tower.1.weight, tower.1.bias",
        "train.dense_optimizer.groups[1] trains 1 parameters: positions.weight",
    ]
    move(model.model, optimizer, gradients[:1])
    settings = {
        "tower.0.weight": (0.05, 0.2),
        "tower.1.weight": (0.025, 0.2),
        "tower.1.bias": (0.025, 0.0),
        "positions.weight": (0.1, 0.3),
    }
    for name, (rate, decay) in settings.items():
        expected = before[name] - rate * (gradients[0][name] + decay * before[name])
        torch.testing.assert_close(model.model.get_parameter(name), expected)


@pytest.mark.parametrize("name", CHOICES)
def test_a_group_of_scale_0_stays_as_it_is(name, gradients):
    model = Small()
    before = copy.deepcopy(model)
    frozen = train(CHOICES[name] + ' groups {parameters: "tower.*" lr_scale: 0}')
    move(model, ScheduledOptimizer(model, frozen, total_steps=7), gradients)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before.get_parameter(key)) == key.startswith("tower."), key


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("towr.*", "Did you mean tower.*?"),
        ("tower.0.weigth", "Did you mean tower.0.weight?"),
        ("*.bais", "Did you mean *.bias?"),
        ("quite else", "They begin with positions, tower."),
    ],
)
def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest_one(pattern, hint):
    config = pb.DenseOptimizer(adamw=pb.AdamW(), groups=[pb.ParameterGroup(parameters=["tower.*", pattern])])
    with pytest.raises(ConfigError) as caught:
        dense_optimizer(Small(), config)
    path = "train.dense_optimizer.groups[0].parameters[1]"
    assert caught.value.findings == [f"{path}: {pattern!r} matches none of the 4 names. {hint}"]


class Partial(DenseOptimizer):
    """Builds what the test says."""

    def build(self, groups: list[DenseGroup]) -> list[torch.optim.Optimizer]:
        return self.make(groups)


class Counting(torch.optim.SGD):
    """Counts steps with a number."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda groups: [torch.optim.SGD(groups[0].parameters, lr=0)],
            ValueError,
            "AdamW does not train positions.weight, tower.1.bias",
        ),
        (
            lambda groups: [Counting([group.for_torch() for group in groups], lr=0)],
            TypeError,
            "AdamW: its state for tower.0.weight has entries that are not tensors: count",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(monkeypatch, make, error, text):
    monkeypatch.setattr(registry, "_CLASSES", {})
    registry.register(pb.AdamW)(type("AdamW", (Partial,), {"make": staticmethod(make)}))
    with pytest.raises(error, match=text):
        dense_optimizer(Small(), pb.DenseOptimizer(adamw=pb.AdamW()))
