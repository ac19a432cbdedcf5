"""Measures baselines for models that search items: popularity and item-to-item co-occurrence.

`measure` fits them to the training rows, chooses the settings of co-occurrence by a grid search on validation
rows, ranks the targets of a split by the rule of the config, and computes the metrics of the config.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import torch

from recsys import protos as pb
from recsys.config.declarations import SeenRule, model_of
from recsys.config.registry import pick
from recsys.evaluation.co_occurrence import CoOccurrence, Neighbors, Popularity, Settings, popularity
from recsys.evaluation.interactions import Interactions, read
from recsys.modules.metrics.base import compute_all

GRID = {
    "distance_power": (0.0, 1.0),
    "recency": (0.4, 0.6, 0.8, 0.95),
    "source_power": (0.5, 1.0),
    "target_power": (0.0, 0.25),
}
"""Values of `co_occurrence.Settings` to try, in all combinations."""

TUNING_ROWS = 2500
"""Most validation rows on which settings are compared; they are evenly spread over the split."""

_MOST_SCORES = 2**22
"""Most scores in memory at once, 32 MiB of float64."""


class Baseline(Protocol):
    """A model that scores items for histories, such as `CoOccurrence` and `Popularity`."""

    def scores(self, histories: Interactions) -> np.ndarray:
        """Scores the catalogue for each row, float64 [B, V]; column k is the item of table row k + 1."""
        ...


@dataclass(frozen=True)
class Measured:
    """The result of one baseline.

    Attributes:
        name: "popularity", "co-occurrence, directed" or "co-occurrence, symmetric".
        metrics: values by the names of the config's metrics.
        settings: settings that were chosen on validation rows; None for a baseline without settings.
        baseline: the fitted model.
    """

    name: str
    metrics: dict[str, float]
    settings: Settings | None
    baseline: Baseline


def measure(pipeline: pb.Pipeline, split: str = "test") -> list[Measured]:
    """Measures all baselines on a split.

    Args:
        pipeline: resolved; its model searches items. `train.evaluation.best_metric` on `data.validation`
            decides the settings; without validation rows or metrics, they are the defaults of `Settings`.
        split: "validation" or "test".

    Raises:
        DataError: files are missing or do not fit the config.
    """
    rule = model_of(pipeline).seen_rule
    train, rows = read(pipeline, "train"), read(pipeline, split)
    counts = popularity(train)
    plain = Popularity(counts)
    results = [Measured("popularity", metrics(plain, rows, pipeline, rule), None, plain)]
    tuning = None
    if pipeline.data.HasField("validation"):
        tuning = rows if split == "validation" else read(pipeline, "validation")
        tuning = tuning.select(slice(0, None, -(-len(tuning.lengths) // TUNING_ROWS) or 1))
    for symmetric in (False, True):
        settings = choose(train, tuning, pipeline, rule, symmetric=symmetric)
        model = CoOccurrence.fit(train, settings)
        name = f"co-occurrence, {'symmetric' if symmetric else 'directed'}"
        results.append(Measured(name, metrics(model, rows, pipeline, rule), settings, model))
    return results


def choose(
    train: Interactions,
    tuning: Interactions | None,
    pipeline: pb.Pipeline,
    rule: SeenRule,
    *,
    symmetric: bool,
) -> Settings:
    """Returns the settings of the grid with the best metric on validation rows, the first of equal ones."""
    name = pipeline.train.evaluation.best_metric
    if tuning is None or not name:
        return Settings(symmetric=symmetric)
    counts, best, chosen = popularity(train), -np.inf, Settings(symmetric=symmetric)
    for distance_power in GRID["distance_power"]:
        neighbors = Neighbors(train, distance_power=distance_power, symmetric=symmetric)
        for recency, source_power in product(GRID["recency"], GRID["source_power"]):
            tried = [
                Settings(symmetric, distance_power, recency, source_power, target_power)
                for target_power in GRID["target_power"]
            ]
            models = [CoOccurrence(neighbors, counts, settings) for settings in tried]
            totals = [Ranked(pipeline) for _ in tried]
            for block in row_blocks(tuning):
                # Only the normalization differs between these settings.
                sums = models[0].sums(block)
                for model, total in zip(models, totals, strict=True):
                    total.add(model.normalize(sums), block, rule)
            for settings, total in zip(tried, totals, strict=True):
                value = total.metrics()[name]
                if value > best:
                    best, chosen = value, settings
    return chosen


def metrics(
    baseline: Baseline, rows: Interactions, pipeline: pb.Pipeline, rule: SeenRule
) -> dict[str, float]:
    """Computes the metrics of the config's model from the ranks that a baseline gives to the targets."""
    ranked = Ranked(pipeline)
    for block in row_blocks(rows):
        ranked.add(baseline.scores(block), block, rule)
    return ranked.metrics()


class Ranked:
    """Accumulates the metrics of a config's model over blocks of scores, in this process alone."""

    def __init__(self, pipeline: pb.Pipeline):
        lists = model_of(pipeline).metrics()
        chosen = [pick(metric) for metric_list in lists for metric in metric_list.metrics]
        self._metrics = {metric.name: metric for metric in (part.cls(part.config) for part in chosen)}
        for metric in self._metrics.values():
            # In a training run, only rank 0 computes baselines: the others would not answer.
            metric.distributed_available_fn = lambda: False

    def add(self, scores: np.ndarray, rows: Interactions, rule: SeenRule) -> None:
        """Adds the rows of a block; the arguments are the same as in `rank_targets`."""
        ranks, weights = map(torch.from_numpy, rank_targets(scores, rows, rule))
        for metric in self._metrics.values():
            metric.update(ranks, weights)

    def metrics(self) -> dict[str, float]:
        """Returns the values over all blocks, by name."""
        return compute_all(self._metrics)


def rank_targets(scores: np.ndarray, rows: Interactions, rule: SeenRule) -> tuple[np.ndarray, np.ndarray]:
    """Ranks each target among the items of the catalogue; ties count against the target.

    Args:
        scores: [B, V], as `Baseline.scores` returns them.
        rows: histories and targets.
        rule: treatment of items of a row's history.

    Returns:
        The ranks, int64 [N], 1 for the best item and V + 1 for a target that cannot be found, and the
        weights, float64 [N], 0 for a target that does not count and 1 for all others.
    """
    row_of_target = np.repeat(np.arange(len(rows.lengths)), rows.num_targets)
    target = np.maximum(rows.targets - 1, 0)
    limit = scores[row_of_target, target]
    missed, weights = rows.targets == 0, np.ones(len(rows.targets))
    seen = np.zeros(scores.shape, bool)
    if rule.removed:
        has_item = rows.items > 0
        seen[rows.rows[has_item], rows.items[has_item] - 1] = True
        repeated = seen[row_of_target, target] & ~missed
        weights[repeated & rule.left_out] = 0
        missed |= repeated
    better = (scores[row_of_target] >= limit[:, None]) & ~seen[row_of_target]
    # The count includes the target itself, unless it was removed; a removed target has a fixed rank.
    ranks = np.where(missed, rows.num_items + 1, better.sum(axis=1))
    return ranks, weights


def row_blocks(rows: Interactions) -> Iterator[Interactions]:
    """Yields runs of rows whose scores fit into memory."""
    size = max(1, _MOST_SCORES // rows.num_items)
    for start in range(0, len(rows.lengths), size):
        yield rows.select(slice(start, start + size))
