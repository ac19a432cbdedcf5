"""Measures a baseline for models that score candidates: the mean label of each item in the training rows.

The prediction for a candidate is `(sum + k * mean) / (count + k)`, with the sum and count of its item's
training labels and the mean of all training labels. Validation rows decide the smoothing k. A second baseline
predicts the mean of all training labels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import MetricList, model_of
from recsys.config.registry import pick
from recsys.data.loader import Loader
from recsys.models.base import layout_rule
from recsys.modules.metrics.base import compute_all

SMOOTHING = (1, 10, 100, 1000)
"""Values of the smoothing k to try."""

_CHOSEN_BY = {"binary": pb.Metric(auc=pb.Auc()), "regression": pb.Metric(mse=pb.Mse())}
"""Metric that decides k, by kind of label: the AUC, or the mean squared error."""


@dataclass(frozen=True)
class MeasuredMeans:
    """The result of one baseline.

    Attributes:
        name: "item means" or "mean".
        metrics: values by the names of the config's metrics.
        settings: the smoothing that was chosen for each task.
    """

    name: str
    metrics: dict[str, float]
    settings: dict[str, float]


class Candidates(NamedTuple):
    """The candidates of a split, as evaluation reads them.

    Attributes:
        items: int64 [N], hashes of the items' original ids.
        labels: float32 [N] by task.
        weights: float32 [N] by task: 0 for a candidate that the task does not count, else 1.
        groups: int64 [N], hash of the row's user, for per-user metrics.
    """

    items: np.ndarray
    labels: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    groups: np.ndarray


def measure(pipeline: pb.Pipeline, split: str = "test") -> list[MeasuredMeans]:
    """Measures both baselines on a split.

    Args:
        pipeline: resolved; its model scores candidates, whose item is the first single-valued id feature of
            side CANDIDATE.
        split: "validation" or "test". Without validation rows the smoothing is 10.

    Raises:
        DataError: files are missing or do not fit the config.
    """
    train, rows = _read(pipeline, "train"), _read(pipeline, split)
    tuning = _read(pipeline, "validation") if pipeline.data.HasField("validation") else None
    of_items, of_all, chosen = {}, {}, {}
    for metric_list in model_of(pipeline).metrics():
        if metric_list.kind is None:
            continue
        task = metric_list.prefix.rstrip("/")
        k = SMOOTHING[1]
        if tuning is not None:
            k = choose(train, tuning, task, metric_list.kind)
        chosen[task] = float(k)
        of_items |= _metrics(metric_list, predictions(train, rows.items, task, k), rows, task)
        mean = np.full(len(rows.items), _mean_label(train, task))
        of_all |= _metrics(metric_list, mean, rows, task)
    return [MeasuredMeans("item means", of_items, chosen), MeasuredMeans("mean", of_all, {})]


def choose(train: Candidates, tuning: Candidates, task: str, kind: str) -> int:
    """Returns the smoothing with the best metric on validation rows, the first of equal ones."""
    metric_list = MetricList([_CHOSEN_BY[kind]], "", "", kind)
    values = []
    for k in SMOOTHING:
        (value,) = _metrics(metric_list, predictions(train, tuning.items, task, k), tuning, task).values()
        values.append(value if kind == "binary" else -value)
    # An AUC without both classes is NaN.
    return SMOOTHING[int(np.argmax(np.nan_to_num(values)))]


def predictions(train: Candidates, items: np.ndarray, task: str, k: float) -> np.ndarray:
    """Returns the smoothed mean label of each item, float64 [N]; without training rows, it is the mean."""
    labels, weights = (values[task].astype(np.float64) for values in (train.labels, train.weights))
    train_items, place = np.unique(train.items, return_inverse=True)
    sums, counts = (np.bincount(place, weights=values) for values in (labels * weights, weights))
    mean = _mean_label(train, task)
    means = (sums + k * mean) / (counts + k)
    nearest = np.minimum(np.searchsorted(train_items, items), len(train_items) - 1)
    return np.where(train_items[nearest] == items, means[nearest], mean)


def _mean_label(train: Candidates, task: str) -> float:
    """Returns the mean label of the candidates that a task counts, or NaN if it counts none."""
    labels, weights = (values[task].astype(np.float64) for values in (train.labels, train.weights))
    return float((labels * weights).sum() / weights.sum()) if weights.any() else np.nan


def _metrics(metric_list: MetricList, predicted: np.ndarray, rows: Candidates, task: str) -> dict[str, float]:
    parts = [pick(metric) for metric in metric_list.metrics]
    built = {metric.name: metric for metric in (part.cls(part.config) for part in parts)}
    columns: list[Tensor] = [
        torch.from_numpy(predicted),
        torch.from_numpy(rows.labels[task]),
        torch.from_numpy(rows.weights[task]),
        torch.from_numpy(rows.groups),
    ]
    for metric in built.values():
        metric.update(*columns)
    return {f"{metric_list.prefix}{name}": value for name, value in compute_all(built).items()}


def _read(pipeline: pb.Pipeline, split: str) -> Candidates:
    counting = pb.Pipeline()
    counting.CopyFrom(pipeline)
    counting.data.num_workers = 0
    if split == "train":
        # A model is trained on some candidates of a long row; counting takes all.
        counting.data.max_candidates = 2**31 - 1
    column = features.candidate_item(counting)
    for feature in counting.features:
        if column == features.PREFIX[pb.CANDIDATE] + feature.name:
            # A vocabulary may leave rare items out, and their means are known all the same.
            feature.id.hash.num_buckets, feature.id.table = 2**31 - 1, "hashes of items"
    items, groups, labels = [], [], {task.name: [] for task in model_of(counting).tasks}
    for batch in Loader.open(counting, split, layout_rule(counting), mode="evaluate").epoch(0):
        count = batch.candidate_timestamps.shape[0]
        rows = torch.repeat_interleave(batch.num_candidates, output_size=count)
        items.append(batch.ids[column].values() if column else torch.zeros(count, dtype=torch.int64))
        groups.append(batch.group[rows])
        for name, parts in labels.items():
            parts.append(batch.labels[name])
    joined = {name: torch.cat(parts).numpy() for name, parts in labels.items()}
    weights = {
        task.name: joined[task.given_task] if task.given_task else np.ones_like(joined[task.name])
        for task in model_of(counting).tasks
    }
    return Candidates(torch.cat(items).numpy(), joined, weights, torch.cat(groups).numpy())
