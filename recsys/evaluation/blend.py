"""Blends a trained model that searches items with co-occurrence, which improves results on small logs.

The score of item j for a history is `(1 - w) log p(j) + w log(q(j) + FLOOR)`. p is the softmax over the
catalogue of the model's similarities divided by the temperature of its loss. q is the share of j in the sum
of all scores of co-occurrence. Validation rows decide the weight w: 0 is the model alone, 1 the counts alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.config.declarations import model_of
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.data.schema.contract import Mode
from recsys.errors import DataError
from recsys.evaluation.baselines import TUNING_ROWS, Ranked, choose, row_blocks
from recsys.evaluation.co_occurrence import CoOccurrence, Settings
from recsys.evaluation.interactions import Interactions, read
from recsys.models.base import layout_rule

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Weights of co-occurrence to try."""

FLOOR = 1e-6
"""Share that every item gets in addition, so that an item without co-occurrence has a finite score."""


class SearchModel(Protocol):
    """A model that compares a query for a history with vectors of items.

    Attributes:
        objective: its attribute `loss` holds the temperature that similarities are divided by.
    """

    objective: Any

    def query(self, batch: Batch) -> Tensor:
        """Returns the query for each row's next item, float32 [B, E]."""
        ...

    def item_vectors(self, batch: Batch) -> Tensor:
        """Returns the vectors of the catalogue, float32 [V, E]."""
        ...


class Queries(NamedTuple):
    """Rows of a split, with the model's queries for them and its item vectors.

    Attributes:
        rows: whole histories and targets.
        queries: float32 [B, E], the model's query for the next item of each row.
        items: float32 [V, E], the model's vectors of the catalogue.
    """

    rows: Interactions
    queries: np.ndarray
    items: np.ndarray


class Block(NamedTuple):
    """Log-probabilities of the catalogue for some rows, float64 [B, V] each."""

    rows: Interactions
    model: np.ndarray
    co_occurrence: np.ndarray


class Blend:
    """Blends a model with co-occurrence.

    Args:
        co_occurrence: the counts, fitted to the training rows.
        temperature: temperature of the model's loss.
        weight: weight of co-occurrence, from 0 to 1.

    Attributes:
        settings: settings of co-occurrence.
    """

    def __init__(
        self, co_occurrence: CoOccurrence, settings: Settings, temperature: float, weight: float = 0.5
    ):
        self.settings, self.weight = settings, weight
        self._co_occurrence, self._temperature = co_occurrence, temperature

    @classmethod
    def fit(cls, pipeline: pb.Pipeline, model: SearchModel, validation: Queries) -> "Blend":
        """Chooses the settings of co-occurrence, then the weight, by the config's best metric.

        Raises:
            DataError: training files are missing or do not fit the config.
        """
        rule, name = model_of(pipeline).seen_rule, pipeline.train.evaluation.best_metric
        train, rows = read(pipeline, "train"), validation.rows
        tuning = rows.select(slice(0, None, -(-len(rows.lengths) // TUNING_ROWS) or 1))
        fitted = []
        for symmetric in (False, True):
            settings = choose(train, tuning, pipeline, rule, symmetric=symmetric)
            blend = cls(CoOccurrence.fit(train, settings), settings, float(model.objective.loss.temperature))
            fitted.append((blend.metrics(pipeline, validation, [1.0])[0][name], blend))
        chosen = max(fitted, key=lambda pair: pair[0])[1]
        values = [metrics[name] for metrics in chosen.metrics(pipeline, validation, WEIGHTS)]
        chosen.weight = WEIGHTS[int(np.argmax(values))]
        return chosen

    def metrics(
        self, pipeline: pb.Pipeline, split: Queries, weights: Sequence[float]
    ) -> list[dict[str, float]]:
        """Computes the metrics of the config's model for each of the given weights of co-occurrence."""
        rule = model_of(pipeline).seen_rule
        totals = [Ranked(pipeline) for _ in weights]
        for block in self.blocks(split):
            for weight, total in zip(weights, totals, strict=True):
                total.add(_mix(block, weight), block.rows, rule)
        return [total.metrics() for total in totals]

    def best_items(self, split: Queries, top_k: int, *, remove_seen: bool) -> tuple[np.ndarray, np.ndarray]:
        """Finds the best items of each row.

        Returns:
            The best items first, as rows of the item table, int64 [B, k], and their scores, float64 [B, k].
            The score is -inf for a removed item, which fills the list if too few other items are left.
        """
        items, scores = [], []
        for block in self.blocks(split):
            mixed = _mix(block, self.weight)
            if remove_seen:
                has_item = block.rows.items > 0
                mixed[block.rows.rows[has_item], block.rows.items[has_item] - 1] = -np.inf
            best = np.argsort(-mixed, axis=1, kind="stable")[:, :top_k]
            items.append(best + 1)
            scores.append(np.take_along_axis(mixed, best, axis=1))
        return np.concatenate(items), np.concatenate(scores)

    def blocks(self, split: Queries) -> Iterator[Block]:
        """Yields the log-probabilities of a split, in blocks of bounded memory."""
        start = 0
        for rows in row_blocks(split.rows):
            stop = start + len(rows.lengths)
            similarity = torch.from_numpy(split.queries[start:stop] @ split.items.T)
            log_p = torch.log_softmax(similarity.double() / self._temperature, dim=1).numpy()
            counts = self._co_occurrence.scores(rows)
            share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
            yield Block(rows, log_p, np.log(share + FLOOR))
            start = stop


def _mix(block: Block, weight: float) -> np.ndarray:
    return (1 - weight) * block.model + weight * block.co_occurrence


def encode(
    pipeline: pb.Pipeline,
    model: SearchModel,
    split: str | pb.Source,
    device: torch.device,
    items: np.ndarray | None = None,
) -> Queries:
    """Reads a split and computes the model's queries.

    Args:
        pipeline: resolved.
        model: in evaluation mode.
        split: "validation", "test", or another source, whose rows need no targets.
        device: device of the model.
        items: the vectors of the catalogue, if they are known; required for another source.

    Raises:
        DataError: files are missing or do not fit the config.
    """
    queries, local = [np.zeros((0, pipeline.model.embedding_dim), np.float32)], pb.Pipeline()
    local.CopyFrom(pipeline)
    local.data.num_workers = 0
    mode: Mode = "evaluate" if isinstance(split, str) else "predict"
    with torch.no_grad():
        for batch in Loader.open(local, split, layout_rule(local), mode=mode).epoch(0):
            moved = batch.to(device)
            queries.append(model.query(moved).cpu().numpy())
            if items is None:
                items = model.item_vectors(moved).cpu().numpy()
    if items is None:
        raise DataError("there are no rows to choose the weight of the blend on")
    return Queries(read(pipeline, split, mode), np.concatenate(queries), items)
