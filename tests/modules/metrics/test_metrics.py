"""Every registered metric keeps its contract: value by brute force, weights, batches, undefined cases."""

import math
import pickle
import warnings

import pytest
import torch

import recsys.modules.metrics  # noqa: F401  (registers)
from recsys import protos as pb
from recsys.config import registry
from tests.modules.metrics import helpers
from tests.modules.metrics.helpers import ORACLES, Candidates, random_candidates

METRICS = registry.registered(pb.Metric)
RANK_METRICS = sorted(set(METRICS) - set(ORACLES))


def make(kind: str):
    component = METRICS[kind]
    return component.cls(component.config)


def value(kind: str, *batches) -> float:
    metric = make(kind)
    for batch in batches:
        metric.update(*batch)
    return metric.compute().item()


def close(actual: float, expected: float) -> bool:
    return math.isclose(actual, expected, rel_tol=1e-7) or (math.isnan(actual) and math.isnan(expected))


def test_every_metric_has_a_name_and_a_direction():
    assert {make(kind).name for kind in METRICS} == {*ORACLES, "hit_rate@10", "ndcg@10", "mrr"}
    higher = {kind for kind in METRICS if make(kind).higher_is_better}
    lower = {kind for kind in METRICS if make(kind).higher_is_better is False}
    assert higher == {"auc", "gauc", "hit_rate", "ndcg", "mrr"}
    assert lower == {"log_loss", "normalized_entropy", "mse", "mae"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ORACLES)
def test_brute_force(kind, seed):
    data = random_candidates(150, seed=seed)
    metric = make(kind)
    metric.update(*data)
    result = metric.compute()
    assert result.shape == () and result.dtype == torch.float64
    assert close(result.item(), ORACLES[kind](data))


@pytest.mark.parametrize("kind", ORACLES)
def test_cutting_into_batches_and_reordering_change_nothing(kind):
    data = random_candidates(97)
    order = torch.randperm(97)
    batches = [data.take(order[:40]), data.take(order[40:40]), data.take(order[40:41]), data.take(order[41:])]
    assert close(value(kind, *batches), value(kind, data))


@pytest.mark.parametrize("kind", ORACLES)
def test_a_row_of_weight_zero_counts_nowhere_even_as_nan(kind):
    data = random_candidates(50)
    filler = Candidates(
        torch.tensor([math.nan, 0.9]), torch.tensor([1.0, math.nan]), torch.zeros(2), torch.tensor([3, 4])
    )
    assert close(value(kind, data, filler), value(kind, data))


@pytest.mark.parametrize("kind", ORACLES)
def test_a_weight_of_three_is_three_rows(kind):
    data = random_candidates(50)
    three = torch.where(torch.arange(50) % 4 == 0, 3.0, 1.0) * data.weights
    repeated = data.take(torch.arange(50).repeat_interleave(torch.where(torch.arange(50) % 4 == 0, 3, 1)))
    assert close(value(kind, data._replace(weights=three)), ORACLES[kind](repeated))


@pytest.mark.parametrize("kind", ORACLES)
@pytest.mark.parametrize("case", ["no rows", "weights of 0", "all positive", "all negative", "one row"])
def test_undefined_is_nan_and_nothing_raises(kind, case):
    data = random_candidates(30)
    data = {
        "no rows": data.take(slice(0)),
        "weights of 0": data._replace(weights=torch.zeros(30)),
        "all positive": data._replace(labels=torch.ones(30)),
        "all negative": data._replace(labels=torch.zeros(30)),
        "one row": random_candidates(30).take(slice(1))._replace(weights=torch.ones(1)),
    }[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(value(kind, data), ORACLES[kind](data))


@pytest.mark.parametrize("kind", RANK_METRICS)
def test_ranks_in_batches_and_of_weight_zero(kind):
    ranks, weights = torch.tensor([1, 12, 3, 1, 10, 11]), torch.tensor([1.0, 1, 1, 0, 1, 2])
    whole = value(kind, (ranks, weights))
    assert close(
        value(kind, (ranks[:4], weights[:4]), (ranks[:0], weights[:0]), (ranks[4:], weights[4:])), whole
    )
    assert close(value(kind, (torch.tensor([1, 12, 3, 10, 11, 11]), torch.ones(6))), whole)
    assert math.isnan(value(kind, (ranks, torch.zeros(6)))) and math.isnan(
        value(kind, (ranks[:0], weights[:0]))
    )


@pytest.mark.parametrize("kind", METRICS)
def test_nothing_was_ever_added(kind):
    metric = make(kind)
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert math.isnan(metric.compute().item())


@pytest.mark.parametrize("kind", ORACLES)
def test_going_on_after_compute_and_starting_over(kind):
    data = random_candidates(80)
    metric = make(kind)
    metric.update(*data.take(slice(30)))
    metric.compute()
    metric.update(*data.take(slice(30, 80)))
    assert close(metric.compute().item(), value(kind, data))
    metric.reset()
    metric.update(*data.take(slice(20)))
    assert close(metric.compute().item(), value(kind, data.take(slice(20))))


@pytest.mark.parametrize("kind", METRICS)
def test_columns_of_other_lengths_are_refused(kind):
    columns = (torch.ones(3), torch.ones(1), torch.ones(3), torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"one-dimensional and of one length; got \[\(3,\), \(1,\)"):
        make(kind).update(*(columns[:2] if kind in RANK_METRICS else columns))


@pytest.mark.parametrize("kind", METRICS)
def test_a_copy_through_pickle_has_the_state(kind):
    metric = make(kind)
    if kind in RANK_METRICS:
        metric.update(torch.tensor([1, 3, 40]), torch.ones(3))
    else:
        metric.update(*random_candidates(40))
    assert close(pickle.loads(pickle.dumps(metric)).compute().item(), metric.compute().item())  # noqa: S301


def test_oracles_are_not_trivial():
    data = random_candidates(150)
    assert 0.5 < helpers.auc(data) < 1 and helpers.auc(data) != helpers.gauc(data)
