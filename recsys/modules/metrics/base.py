"""States that metrics share: sums, means, and all rows.

A row of weight 0 (the filler that keeps ranks in step) counts nowhere, whatever stands in it; a row of
another weight counts as that many rows. Sums are float64. A value that is not defined, such as that of no
rows, is NaN.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class SumMetric(Metric):
    """Named sums over rows; a metric is a function of them.

    Attributes:
        name: what logs call it.
    """

    name: str
    is_differentiable = False
    full_state_update = False

    def __init__(self, sums: tuple[str, ...]):
        # A cached value would be returned without the collectives that the other ranks wait in.
        super().__init__(compute_with_cache=False)
        for key in sums:
            self.add_state(key, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")


class PredictionMean(SumMetric):
    """Mean over candidates of a function of prediction and label, `values`."""

    def __init__(self) -> None:
        super().__init__(("total", "weight"))

    def values(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """[N], [N] float64 -> [N] float64."""
        raise NotImplementedError

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds candidates, all [N]; `groups` is not used."""
        check_shapes(predictions, labels, weights, groups)
        self.total += weighted_sum(self.values(predictions.double(), labels.double()), weights)
        self.weight += weights.double().sum()

    def compute(self) -> Tensor:
        """Scalar float64, NaN without rows."""
        return self.total / self.weight


class RankMean(SumMetric):
    """Mean over targets of a function of their rank, `gain`."""

    higher_is_better = True

    def __init__(self) -> None:
        super().__init__(("total", "weight"))

    def gain(self, ranks: Tensor) -> Tensor:
        """[M] float64 ranks, 1 for the best -> [M] float64."""
        raise NotImplementedError

    def update(self, ranks: Tensor, weights: Tensor) -> None:
        """Adds targets: [M] int64 ranks in the whole catalogue, 1 for the best, and [M] weights."""
        check_shapes(ranks, weights)
        self.total += weighted_sum(self.gain(ranks.double()), weights)
        self.weight += weights.double().sum()

    def compute(self) -> Tensor:
        """Scalar float64, NaN without rows."""
        return self.total / self.weight


class AllRows(Metric):
    """Keeps every candidate until `compute`: what exact order statistics need. 20 bytes a candidate.

    Attributes:
        name: what logs call it.
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
        super().__init__(compute_with_cache=False)
        for key in self._DTYPES:
            self.add_state(key, [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> None:
        """Adds candidates, all [N]; `groups` int64."""
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
        """As in torchmetrics, but a rank without rows takes part: an empty list would skip collectives."""
        for key, dtype in self._DTYPES.items():
            if isinstance(state := getattr(self, key), list) and not state:
                state.append(torch.empty(0, dtype=dtype, device=self.device))
        super().sync(dist_sync_fn, process_group, should_sync, distributed_available)

    def rows(self, key: str) -> Tensor:
        """One column of all rows, joined; behind a sync it is a tensor already."""
        state = getattr(self, key)
        if isinstance(state, Tensor):
            return state
        return torch.cat(state) if state else torch.empty(0, dtype=self._DTYPES[key], device=self.device)


def compute_all(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values of metrics by name, NaN where undefined. Collective."""
    with warnings.catch_warnings():
        # torchmetrics cuts what it gathered with a list of slices; torch warns of that on every rank.
        warnings.filterwarnings("ignore", "Using a non-tuple sequence", UserWarning)
        return {name: float(metric.compute()) for name, metric in metrics.items()}


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Scalar float64; what stands in a row of weight 0, NaN included, does not matter."""
    return torch.where(weights > 0, values.double() * weights.double(), 0).sum()


def check_shapes(*columns: Tensor) -> None:
    """
    Raises:
        ValueError: columns that are not one-dimensional and of one length; they would be broadcast.
    """
    shapes = [tuple(column.shape) for column in columns]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"a metric's columns are one-dimensional and of one length; got {shapes}")
