"""Hit rate, NDCG and MRR by hand."""

import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.metrics import HitRate, Mrr, Ndcg

RANKS = torch.tensor([1, 2, 10, 11, 4000])


def value(metric) -> float:
    metric.update(RANKS, torch.ones(5))
    return metric.compute().item()


@pytest.mark.parametrize(("k", "expected"), [(1, 0.2), (2, 0.4), (9, 0.4), (10, 0.6), (4000, 1.0)])
def test_hit_rate(k, expected):
    metric = HitRate(pb.HitRate(k=k))
    assert value(metric) == pytest.approx(expected)
    assert metric.name == f"hit_rate@{k}"


def test_ndcg():
    metric = Ndcg(pb.Ndcg(k=10))
    # 1 / log2(2), 1 / log2(3), 1 / log2(11).
    assert value(metric) == pytest.approx((1 + math.log(2) / math.log(3) + math.log(2) / math.log(11)) / 5)
    assert metric.name == "ndcg@10"


def test_ndcg_of_one_is_the_hit_rate_of_one():
    assert value(Ndcg(pb.Ndcg(k=1))) == value(HitRate(pb.HitRate(k=1)))


def test_mrr():
    assert value(Mrr(pb.Mrr())) == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11 + 1 / 4000) / 5)


@pytest.mark.parametrize("metric", [(HitRate, pb.HitRate), (Ndcg, pb.Ndcg)])
def test_a_list_has_items(metric):
    cls, message = metric
    with pytest.raises(ValueError, match="k: 0 is given"):
        cls(message(k=0))
