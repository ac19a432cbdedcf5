"""Computes the metrics of a model over a split, exactly, over all ranks.

The same function serves evaluation during training and `recsys.evaluate`. It has no side effects on training:
it restores the model's mode, the state of the random number generators, and the counters of fused optimizers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.data.counts import Counts
from recsys.data.loader import Loader
from recsys.models.base import CollectedRows, Losses, Model
from recsys.modules.metrics.base import compute_all, several_processes
from recsys.scoring.scorer import EagerModel, Scorer
from recsys.training.diagnostics import Diagnostics
from recsys.training.distributed import gather
from recsys.training.local_lookup import kernels_of
from recsys.training.recorded_evaluation import BatchResults, EvaluationRecorder
from recsys.training.state import Best, capture_rng, restore_rng

LOSS = "loss"
"""Name of the weighted loss among the metrics; the loss of a task is `loss/<task>`."""


@dataclass(frozen=True)
class BestMetric:
    """The metric by which states of a run are compared, and whether higher values of it are better."""

    metric: str
    higher_is_better: bool

    @classmethod
    def of(cls, model: Model, config: pb.Evaluation) -> "BestMetric":
        """Reads the metric from a resolved and checked config. It is the loss if the model has no metrics."""
        name = config.best_metric
        return cls(name, bool(model.metrics()[name].higher_is_better)) if name else cls(LOSS, False)

    def reached(self, value: float, best: Best | None) -> bool:
        """Returns whether `value` is better than the best one so far; NaN never is."""
        if math.isnan(value):
            return False
        if best is None or best.metric != self.metric:
            return True
        return value > best.value if self.higher_is_better else value < best.value


def evaluate(
    model: Model,
    loader: Loader,
    device: torch.device,
    max_batches: int | None = None,
    diagnostics: Diagnostics | None = None,
    recorder: EvaluationRecorder | None = None,
) -> dict[str, float]:
    """Computes metrics and losses of `model` on the batches of `loader`. Collective.

    Args:
        model: the model as built, or with its tables sharded in place.
        max_batches: the most batches that each rank reads; None reads all.
        diagnostics: diagnoses the same batches; the caller reads its results afterwards. Nothing is recorded
            then.
        recorder: replays graphs, also of earlier evaluations of the model; None computes every batch as it
            is. See `evaluation_recorder_for`.

    Returns:
        The model's metrics by name, `loss` and, if there are several tasks, `loss/<task>`; NaN where
        undefined.
    """
    with _aside(model, device):
        metrics = {name: metric.to(device) for name, metric in model.metrics().items()}
        collected = CollectedRows(metrics)
        totals: Losses | None = None
        # Scoring with a cache makes several calls per batch: their number may differ between ranks, which
        # sharded tables do not allow, and diagnostics need each row in one call.
        alone = not several_processes()
        scorer = Scorer(EagerModel(model, may_cache=alone and diagnostics is None), model.pipeline)
        for batch in loader.first(max_batches):
            if diagnostics is None and recorder is not None and not recorder.failed:
                results = recorder.results(batch)
            else:
                batch = batch.to(device)
                with diagnostics.watching(batch) if diagnostics else nullcontext():
                    outputs = scorer.score(batch)
                results = BatchResults.of(model, outputs, batch)
                if diagnostics:
                    diagnostics.update(results.rows, batch)
            collected.add(results.rows)
            totals = _add(totals, results.losses)
        collected.update()
        return compute_all(metrics) | _mean_losses(totals)


def ratios(
    model: Model,
    sums_of: Callable[[Batch], dict[str, torch.Tensor]],
    loader: Loader,
    device: torch.device,
    max_batches: int | None = None,
) -> dict[str, float]:
    """Computes ratios of sums over all rows. Collective.

    Args:
        model, loader, device, max_batches: as for `evaluate`.
        sums_of: a method of the model, `exact_recall` or `weight_gains`: sums of a batch by name, float64
            [2], numerator and denominator.

    Returns:
        Ratios by name, such as `recall@10/beam_50`; NaN where the denominator is 0.
    """
    totals: dict[str, torch.Tensor] = {}
    with _aside(model, device):
        for batch in loader.first(max_batches):
            for name, counts in sums_of(batch.to(device)).items():
                totals[name] = totals.get(name, 0) + counts
    packed = gather({name: counts.cpu() for name, counts in totals.items()})
    names = dict.fromkeys(name for part in packed for name in part)
    sums = {name: torch.stack([part[name] for part in packed if name in part]).sum(0) for name in names}
    return {name: (counts[0] / counts[1]).item() for name, counts in sums.items()}


def counted(loader: Loader) -> Counts:
    """Counts the rows of all ranks that the last evaluation left out or cut. Collective."""
    total = Counts()
    for counts in gather(loader.counter.counts):
        total = total.plus(counts)
    return total


@contextmanager
def _aside(model: nn.Module, device: torch.device) -> Iterator[None]:
    training = model.training
    random_state = capture_rng(device)
    # FBGEMM counts every lookup as a batch that Adam has seen, also those that train nothing.
    tables = [module for module in model.modules() if isinstance(module, ShardedEmbeddingCollection)]
    kernels = [kernel.emb_module for group in tables for kernel in kernels_of(group)]
    counters = [counter for kernel in kernels for counter in (kernel.iter_cpu, kernel.iter)]
    counts = [counter.clone() for counter in counters]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for counter, count in zip(counters, counts, strict=True):
            counter.copy_(count)
        restore_rng(random_state, device)


def _add(total: Losses | None, more: Losses) -> Losses:
    sums, counts = more.sums.double(), more.counts.double()
    if total is not None:
        sums, counts = total.sums + sums, total.counts + counts
    return Losses(more.names, sums, counts, more.weights)


def _mean_losses(totals: Losses | None) -> dict[str, float]:
    if totals is None:
        return {}
    packed = torch.stack([totals.sums, totals.counts])
    if several_processes():
        dist.all_reduce(packed)
    means = (packed[0] / packed[1]).tolist()
    total = sum(weight * mean for weight, mean in zip(totals.weights, means, strict=True))
    parts = {f"{LOSS}/{name}": mean for name, mean in zip(totals.names, means, strict=True)}
    return {LOSS: total} | (parts if len(parts) > 1 else {})
