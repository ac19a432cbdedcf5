"""Evaluates an exported package: the metrics of its model, computed from the package's own answers.

An answer holds predictions or item scores but no logits, so there are metrics and no losses. The items of a
retriever are ranked exactly, by the vectors that the package holds.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.data.schema.row_layout import ShardedRowLayout, sharded_name
from recsys.inference.eager import EagerPackage
from recsys.inference.golden import largest_difference
from recsys.inference.package import Package
from recsys.inference.shared_rows import PackageProgram
from recsys.models.base import CollectedRows, build_model
from recsys.modules.metrics.base import compute_all
from recsys.scoring.scorer import Scorer
from recsys.training.distributed import gather


@dataclass(frozen=True)
class PackageEvaluation:
    """The metrics of a package on a split.

    Attributes:
        metrics: the model's metrics by name; NaN where undefined.
        difference: largest |a - b| / max(1, |b|) between the answers, and vectors of items, of the package
            and those of the evaluated model; None without a model to compare with.
    """

    metrics: dict[str, float]
    difference: float | None


def evaluate_package(
    package: Package | EagerPackage,
    loader: Loader,
    device: torch.device,
    limit: int | None = None,
    reference: EagerPackage | None = None,
) -> PackageEvaluation:
    """Computes the metrics of a package on the batches of `loader`, exactly. Collective.

    Args:
        package: the package, or a model in eager mode.
        loader: reads rows for evaluation.
        device: where metrics are computed.
        limit: the most batches that each rank reads; None reads all.
        reference: the evaluated model, whose answers are compared with those of the package.

    Raises:
        DataError: a row is bad.
        PackageError: a batch has more rows than the package accepts.
        RecsysError: the model cannot be measured by its answers.
    """
    # Its weights are never used: it only says how answers are measured.
    model = build_model(package.pipeline, whole=False)
    metrics = {name: metric.to(device) for name, metric in model.metrics().items()}
    collected = CollectedRows(metrics)
    items, answers = _items(package, device), _Answers(package)
    compared = None if reference is None else _Compared(package, reference)
    with torch.no_grad():
        for batch in loader.first(limit):
            answer = answers.of(batch)
            if compared is not None:
                compared.add(answer, batch)
            on_device = [part.to(device) for part in answer]
            collected.add(model.answer_rows(on_device, items, batch.to(device)))
    collected.update()
    difference = None if compared is None else max(gather(compared.largest))
    return PackageEvaluation(compute_all(metrics), difference)


class _Answers:
    """Scores batches in the way in which a prediction does."""

    def __init__(self, package: Package | EagerPackage):
        self._package = package
        program = package if isinstance(package, EagerPackage) else PackageProgram(package)
        self._scorer = Scorer(program, package.pipeline)
        self._finds_items = model_of(package.pipeline).finds_items

    def of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns the answer to a batch on the host, in the form of `Model.answer_rows`."""
        if self._finds_items:
            best = self._package.find(batch)
            return best.scores, best.items
        return (self._scorer.score(batch),)


class _Compared:
    """Compares the answers and vectors of items of a package with those of the evaluated model.

    Attributes:
        largest: the largest difference so far.
    """

    def __init__(self, package: Package | EagerPackage, reference: EagerPackage):
        self._answers = _Answers(reference)
        self.largest = 0.0
        if package.items is not None and reference.items is not None:
            self.largest = largest_difference(package.items, reference.items)

    def add(self, answer: tuple[Tensor, ...], batch: Batch) -> None:
        """Compares the package's answer to a batch."""
        # Of items that a model has found, the scores are compared: equal ones may come in another order.
        scores, expected = answer[0].float().cpu(), self._answers.of(batch)[0].float().cpu()
        self.largest = max(self.largest, largest_difference(scores, expected))


def _items(package: Package | EagerPackage, device: torch.device) -> Tensor | None:
    """Returns the vectors of all items, [V, E], in the order of their table instead of their vocabulary."""
    if package.items is None:
        return None
    table = features.searched_item(package.pipeline).id.table
    layout = ShardedRowLayout(len(package.items), sharded_name(package.pipeline, table))
    places = layout.id_of(np.arange(1, len(package.items) + 1))
    return package.items[torch.from_numpy(places)].to(device)
