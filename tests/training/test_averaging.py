"""Averages against sums written out by hand, in double precision."""

import math

import pytest
import torch
from torch import nn

from recsys import protos as pb
from recsys.errors import RecsysError
from recsys.training import averaging, checkpoint
from recsys.training.averaging import WeightAverage, describe
from tests.training.test_checkpoint import state_of

STEPS = 40


class Trained:
    """Weights that a run would have: new random ones at every step."""

    def __init__(self, config: pb.WeightAveraging, seed: int = 5):
        generator = torch.Generator().manual_seed(seed)
        self.values = [torch.randn(3, 2, generator=generator) for _ in range(STEPS + 1)]
        self.weight, self.constant = self.values[0].clone(), torch.ones(2)
        self.ids = torch.arange(3)
        weights = {"model.w": self.weight, "model.constant": self.constant, "model.ids": self.ids}
        self.average = WeightAverage(weights, ["model.constant"], config)
        self.step = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.weight.copy_(self.values[self.step])
            self.average.update(self.step)

    def averaged(self) -> torch.Tensor:
        with self.average.in_place(self.step):
            return self.weight.clone()


def ema(**fields) -> pb.WeightAveraging:
    return pb.WeightAveraging(ema=pb.Ema(**fields))


def ema_by_hand(values: list[torch.Tensor], decay: float) -> torch.Tensor:
    """The product form: the share of each value is (1 - d_k) times all decays behind it."""
    decays = [min(decay, (k - 1) / (k + 8)) for k in range(1, len(values) + 1)]
    shares = []
    for k, last in enumerate(decays):
        share = 1 - last
        for later in decays[k + 1 :]:
            share *= later
        shares.append(share)
    assert sum(shares) == pytest.approx(1)
    return sum(share * value.double() for share, value in zip(shares, values, strict=True))


@pytest.mark.parametrize(("decay", "every"), [(0.999, 1), (0.5, 1), (0.0, 1), (0.9, 3)])
def test_exponential_average(decay, every):
    trained = Trained(ema(decay=decay, every_steps=every))
    for _ in range(STEPS):
        trained.run(1)
        counted = trained.values[every : trained.step + 1 : every]
        expected = ema_by_hand(counted, decay) if counted else trained.weight.double()
        torch.testing.assert_close(trained.averaged().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("start", "every"), [(1, 1), (7, 1), (7, 5), (40, 3)])
def test_stochastic_average(start, every):
    trained = Trained(pb.WeightAveraging(swa=pb.Swa(start_step=start, every_steps=every)))
    for _ in range(STEPS):
        trained.run(1)
        counted = trained.values[start : trained.step + 1 : every]
        expected = torch.stack(counted).double().mean(0) if counted else trained.weight.double()
        torch.testing.assert_close(trained.averaged().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_weight_with_two_names_is_itself_again_after_evaluations():
    """Generators have one: the codes of the decoder are those of the history."""
    weight = torch.tensor([1.0])
    average = WeightAverage({"model.encoder": weight, "model.decoder": weight}, [], ema(decay=0.0))
    average.update(1)
    weight.fill_(2.0)
    for _ in range(2):
        with average.in_place(1):
            assert weight.item() == 1.0
        assert weight.item() == 2.0
        assert [tensor.item() for tensor in average.tensors(1).values()] == [1.0, 1.0]


def test_first_weights_do_not_dominate_a_short_run():
    """After 20 updates with a decay of .999, 98 % of a plain average would be its first value."""
    trained = Trained(ema(decay=0.999))
    for early in trained.values[:2]:
        early.fill_(1e7)
    trained.run(20)
    rest = ema_by_hand([torch.zeros(3, 2), *trained.values[2:21]], 0.999)
    first = 1e7 / math.comb(28, 9)  # 1/10 x 2/11 x ... x 19/28
    torch.testing.assert_close(trained.averaged().double(), rest + first, rtol=1e-4, atol=1e-5)


def test_weights_come_back_to_the_bit_and_constants_stay(monkeypatch):
    monkeypatch.setattr(averaging, "_CHUNK", 4)
    trained = Trained(ema(decay=0.9))
    trained.run(9)
    before = trained.weight.clone()
    stored = trained.average.tensors(trained.step)["average.w"].clone()
    with pytest.raises(KeyError), trained.average.in_place(trained.step):
        assert torch.equal(trained.weight, stored)
        raise KeyError
    assert torch.equal(trained.weight, before)
    assert not torch.equal(before, stored)
    assert list(trained.average.tensors(trained.step)) == ["average.w"]
    trained.average.take_over(trained.step)
    assert torch.equal(trained.weight, stored)


@pytest.mark.parametrize("steps", [3, 12])
def test_evaluated_weights_are_what_a_saved_state_gives(tmp_path, steps):
    """Also before the first update of the average."""
    trained = Trained(pb.WeightAveraging(swa=pb.Swa(start_step=5, every_steps=2)))
    trained.run(steps)
    tensors = {"model.w": trained.weight, "model.constant": trained.constant}
    checkpoints = checkpoint.Checkpoints(tmp_path)
    path = checkpoints.save(tensors | trained.average.tensors(steps), state_of(steps))
    model = nn.Module()
    model.w, model.constant = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(2))
    checkpoint.load_weights(path, model)
    assert torch.equal(model.w.detach(), trained.averaged())
    assert torch.equal(model.constant.detach(), torch.ones(2))
    model.other = nn.Parameter(torch.zeros(1))
    with pytest.raises(RecsysError, match="model.other: missing in the checkpoint"):
        checkpoint.load_weights(path, model)
    del model.other, model.w
    with pytest.raises(RecsysError, match="average.w: in the checkpoint only"):
        checkpoint.load_weights(path, model)


def test_words():
    assert describe(ema(decay=0.99)) == "exponential moving average, decay 0.99, every 1 step(s)"
    swa = pb.WeightAveraging(swa=pb.Swa(start_step=7))
    assert describe(swa) == "mean of the weights after every 50 step(s) from step 7 on"
