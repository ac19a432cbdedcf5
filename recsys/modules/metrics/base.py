"""Base classes of metrics, by the state they keep: sums, means, or all rows.

A row of weight 0 (a filler that keeps ranks in step) is ignored, whatever its values; a row of weight w
counts as w rows. Sums are float64. An undefined value, such as a mean over no rows, is NaN.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric


def several_processes() -> bool:
    """Returns whether metrics have to be synchronized.

    torchmetrics asks only whether there is a process group. A training has one even if it is a single
    process, and each state of each metric would cost it a barrier and one or two collectives.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class SumMetric(Metric):
    """A metric that is a function of named sums over rows.

    Attributes:
        name: the metric's name in logs.
    """

    name: str
    is_differentiable = False
    full_state_update = False

    def __init__(self, sums: tuple[str, ...]):
        # A cached value would skip the collectives in which the other ranks wait.
        super().__init__(compute_with_cache=False, distributed_available_fn=several_processes)
        for key in sums:
            self.add_state(key, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")


class PredictionMean(SumMetric):
    """A metric that is the mean over candidates of `values`, a function of prediction and label."""

    def __init__(self) -> None:
        super().__init__(("total", "weight"))

    def values(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """Maps predictions and labels, float64 [N] each, to float64 [N]."""
        raise NotImplementedError

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds N candidates; all arguments are [N], and `groups` is not used."""
        check_shapes(predictions, labels, weights, groups)
        self.total += weighted_sum(self.values(predictions.double(), labels.double()), weights)
        self.weight += weights.double().sum()

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN without rows."""
        return self.total / self.weight


class RankMean(SumMetric):
    """A metric that is the mean over targets of `gain`, a function of the target's rank."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(("total", "weight"))

    def gain(self, ranks: Tensor) -> Tensor:
        """Maps ranks, float64 [M], where 1 is the best, to float64 [M]."""
        raise NotImplementedError

    def update(self, ranks: Tensor, weights: Tensor) -> None:
        """Adds M targets: int64 [M] ranks in the whole catalogue, where 1 is the best, and [M] weights."""
        check_shapes(ranks, weights)
        self.total += weighted_sum(self.gain(ranks.double()), weights)
        self.weight += weights.double().sum()

    def compute(self) -> Tensor:
        """Returns a float64 scalar; NaN without rows."""
        return self.total / self.weight


class AllRows(Metric):
    """A metric that needs all candidates at once, such as an exact order statistic.

    It stores 20 bytes per candidate.

    Attributes:
        name: the metric's name in logs.
    """

    name: str
    is_differentiable = False
    full_state_update = False

    _DTYPES = {
        "predictions": torch.float32,
        "labels": torch.float32,
        "weights": torch.float32,
        "groups": torch.int64,
    }

    def __init__(self) -> None:
        super().__init__(compute_with_cache=False, distributed_available_fn=several_processes)
        for key in self._DTYPES:
            self.add_state(key, [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds N candidates; all arguments are [N], and `groups` is int64."""
        check_shapes(predictions, labels, weights, groups)
        for key, value in zip(self._DTYPES, (predictions, labels, weights, groups), strict=True):
            getattr(self, key).append(value.detach().to(self._DTYPES[key]))

    def sync(
        self,
        dist_sync_fn: Callable | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable | None = None,
    ) -> None:
        """Synchronizes ranks, even without rows: torchmetrics would skip the collectives of an empty list."""
        for key, dtype in self._DTYPES.items():
            if isinstance(state := getattr(self, key), list) and not state:
                state.append(torch.empty(0, dtype=dtype, device=self.device))
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)

    def rows(self, key: str) -> Tensor:
        """Returns a column of all rows as one tensor, which it already is after a sync."""
        state = getattr(self, key)
        if isinstance(state, Tensor):
            return state
        return torch.cat(state) if state else torch.empty(0, dtype=self._DTYPES[key], device=self.device)


def compute_all(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns the values of metrics by name, NaN where undefined. Collective."""
    with warnings.catch_warnings():
        # torchmetrics indexes gathered tensors with a list of slices, which makes torch warn on every rank.
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
        return {name: float(metric.compute()) for name, metric in metrics.items()}


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted sum as a float64 scalar; values with weight 0 are ignored, even NaN."""
    return torch.where(weights > 0, values.double() * weights.double(), 0).sum()


def check_shapes(*columns: Tensor) -> None:
    """Checks that columns are one-dimensional and equally long, because others would be broadcast.

    Raises:
        ValueError: the columns do not have these shapes.
    """
    shapes = [tuple(column.shape) for column in columns]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"a metric's columns are one-dimensional and of one length; got {shapes}")
