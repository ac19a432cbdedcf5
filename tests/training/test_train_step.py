"""The one sum over ranks: means, gradients, signals, and what stops a run; against plain arithmetic."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recsys.data.batch import Position, Rows
from recsys.data.counts import Counts
from recsys.errors import NonFiniteLossError
from recsys.models.base import Losses
from recsys.ops import SequenceLayout
from recsys.training import train_step
from recsys.training.totals import Totals, add_up
from recsys.training.train_step import SumOverRanks


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LAYOUT = SequenceLayout(torch.tensor([20, 1, 2]), torch.tensor([4, 0, 1]), 1)
BATCH = SimpleNamespace(
    layout=LAYOUT,
    sequences=LAYOUT,
    sample_weight=torch.tensor([1.0, 0.0, 2.0]),
    position=Position(2, 5),
    rows=Rows(torch.zeros(3), torch.zeros(3), counts=Counts(left_out=1, cut_histories=2)),
)


def count_flops(batch: object) -> int:
    assert batch is BATCH
    return 1000


def totals(sums: torch.Tensor, counts: list[float]) -> Totals:
    losses = Losses(("click", "time"), sums, torch.tensor(counts), (1.0, 0.25))
    return add_up(losses, BATCH.sample_weight)


def test_the_loss_is_the_weighted_sum_of_the_means():
    sums = torch.tensor([6.0, 20.0], requires_grad=True)
    loss, pending = SumOverRanks(count_flops)(totals(sums, [4.0, 5.0]), BATCH)
    result = pending.wait()
    assert loss.item() == result.loss == 6 / 4 + 0.25 * 20 / 5
    assert result.losses == {"click": 1.5, "time": 4.0}
    assert (result.samples, result.tokens, pending.position) == (2, 23, Position(2, 5))
    assert result.flop == 3 * 1000
    assert pending.history_lengths.tolist() == [15, 0, 0]
    loss.backward()
    assert sums.grad.tolist() == [1 / 4, pytest.approx(0.25 / 5)]


def test_gradients_are_scaled_such_that_the_mean_over_ranks_is_that_of_the_whole(monkeypatch):
    later = torch.tensor(
        [2.0, 4.0, 4.0, 15.0, 1.0, 7.0, 500.0, 30.0, 0.0, 10.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64
    )
    monkeypatch.setattr(train_step.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train_step.dist, "all_reduce", lambda packed: packed.add_(later))
    sums = torch.tensor([6.0, 20.0], requires_grad=True)
    loss, pending = SumOverRanks(count_flops)(totals(sums, [4.0, 5.0]), BATCH)
    result = pending.wait()
    assert result.losses == {"click": (6 + 2) / (4 + 4), "time": (20 + 4) / (5 + 15)}
    assert (result.samples, result.tokens, result.flop) == (3, 30, 3500)
    assert pending.history_lengths.tolist() == [15, 0, 0]
    assert result.signals == {2: 0, 15: 1, 0: 1}
    assert result.counts == Counts(left_out=31, cut_histories=2, cut_candidates=10)
    loss.backward()
    assert sums.grad.tolist() == [2 / 8, pytest.approx(2 * 0.25 / 20)]


def test_one_collective_carries_all_tasks_and_counts(monkeypatch):
    reduced = []
    monkeypatch.setattr(train_step.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train_step.dist, "all_reduce", lambda packed: reduced.append(packed.tolist()))
    SumOverRanks(count_flops)(totals(torch.tensor([6.0, 20.0]), [4.0, 5.0]), BATCH)
    (packed,) = reduced
    assert packed[:4] == [6.0, 20.0, 4.0, 5.0]


def test_a_rank_without_candidates_takes_the_others_mean(monkeypatch):
    later = torch.tensor(
        [2.0, 4.0, 4.0, 16.0, 1.0, 7.0, 500.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64
    )
    monkeypatch.setattr(train_step.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train_step.dist, "all_reduce", lambda packed: packed.add_(later))
    sums = torch.zeros(2, requires_grad=True)
    loss, pending = SumOverRanks(count_flops)(totals(sums, [0.0, 0.0]), BATCH)
    result = pending.wait()
    assert result.losses == {"click": 2 / 4, "time": 4 / 16}
    assert loss.item() == 0
    loss.backward()
    assert sums.grad.tolist() == [2 / 4, 2 * 0.25 / 16]


def test_weights_may_add_up_to_less_than_one():
    sums = torch.tensor([0.1, 0.3], requires_grad=True)
    loss, pending = SumOverRanks(count_flops)(totals(sums, [0.25, 0.5]), BATCH)
    result = pending.wait()
    assert result.losses == pytest.approx({"click": 0.4, "time": 0.6})
    assert loss.item() == pytest.approx(0.4 + 0.25 * 0.6)


def test_a_task_without_targets_is_zero_and_gives_no_gradient():
    sums = torch.tensor([6.0, 0.0], requires_grad=True)
    loss, pending = SumOverRanks(count_flops)(totals(sums, [4.0, 0.0]), BATCH)
    result = pending.wait()
    assert result.losses == {"click": 1.5, "time": 0.0}
    assert loss.item() == 1.5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_named(value):
    with pytest.raises(NonFiniteLossError, match=f"^the loss of task time is {value}$"):
        SumOverRanks(count_flops)(totals(torch.tensor([6.0, value]), [4.0, 5.0]), BATCH)[1].wait()


def test_a_signal_is_told_to_all():
    module = SumOverRanks(count_flops)
    module.received[15] = 1
    assert module(totals(torch.ones(2), [1.0, 1.0]), BATCH)[1].wait().signals == {2: 0, 15: 1, 0: 0}
