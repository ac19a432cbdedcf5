"""Brute force: metrics written as loops over rows and pairs, in Python floats."""

import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """The arguments of a ranking metric, in its order."""

    predictions: Tensor
    labels: Tensor
    weights: Tensor
    groups: Tensor

    def take(self, rows) -> "Candidates":
        return Candidates(*(column[rows] for column in self))


def random_candidates(count: int, *, num_groups: int = 7, levels: int = 20, seed: int = 0) -> Candidates:
    """Probabilities on a coarse grid, so that many are tied; one row in five has weight 0."""
    generator = torch.Generator().manual_seed(seed)
    predictions = torch.randint(1, levels, (count,), generator=generator) / levels
    labels = (torch.rand(count, generator=generator) < predictions).float()
    weights = (torch.rand(count, generator=generator) < 0.8).float()
    groups = torch.randint(-num_groups, num_groups, (count,), generator=generator) * 10**12
    return Candidates(predictions, labels, weights, groups)


def rows(data: Candidates) -> list[tuple[float, float, int]]:
    """(prediction, label, group) of each row that counts."""
    columns = (column.tolist() for column in data)
    return [(p, y, g) for p, y, w, g in zip(*columns, strict=True) if w > 0]


def auc(data: Candidates) -> float:
    return _auc([(p, y) for p, y, _ in rows(data)])


def gauc(data: Candidates) -> float:
    of_group = defaultdict(list)
    for p, y, group in rows(data):
        of_group[group].append((p, y))
    actual = [(_auc(list_of), len(list_of)) for list_of in of_group.values()]
    actual = [(value, size) for value, size in actual if not math.isnan(value)]
    total = sum(size for _, size in actual)
    return sum(value * size for value, size in actual) / total if total else math.nan


def log_loss(data: Candidates, eps: float = 1e-7) -> float:
    losses = []
    for p, y, _ in rows(data):
        clipped = min(max(p, eps), 1 - eps)
        losses.append(-math.log(clipped) if y else -math.log(1 - clipped))
    return _mean(losses)


def normalized_entropy(data: Candidates) -> float:
    rate = _mean([y for _, y, _ in rows(data)])
    if not 0 < rate < 1:
        return math.nan
    return log_loss(data) / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def calibration(data: Candidates) -> float:
    observed = sum(y for _, y, _ in rows(data))
    return sum(p for p, _, _ in rows(data)) / observed if observed else math.nan


def mse(data: Candidates) -> float:
    return _mean([(p - y) ** 2 for p, y, _ in rows(data)])


def mae(data: Candidates) -> float:
    return _mean([abs(p - y) for p, y, _ in rows(data)])


ORACLES = {
    "auc": auc,
    "gauc": gauc,
    "log_loss": log_loss,
    "normalized_entropy": normalized_entropy,
    "calibration": calibration,
    "mse": mse,
    "mae": mae,
}
"""By the field of pb.Metric."""


def _auc(list_of: list[tuple[float, float]]) -> float:
    positives = [p for p, y in list_of if y]
    negatives = [p for p, y in list_of if not y]
    if not positives or not negatives:
        return math.nan
    wins = sum((p > n) + (p == n) / 2 for p in positives for n in negatives)
    return wins / (len(positives) * len(negatives))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
