"""Diagnoses a trained model beyond its metrics: slices by history length, calibration, attention pictures.

This costs more than an evaluation during training should, so only the last evaluation and that of the best
state include it. Each rank accumulates sums (ranking metrics also keep their rows), which `results` combines.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.data.batch import Batch
from recsys.models.base import MetricRows, Model, add_rows
from recsys.modules.metrics.base import compute_all, several_processes
from recsys.modules.metrics.reliability import Reliability, ReliabilityBin
from recsys.training.attention import AttentionPicture, AttentionRecorder

_ENDS = (10, 50, 200, 1000, 5000, 20_000, 100_000)
"""Longest history of each slice, in events. `slice_ends` cuts the list at `data.max_history_len`."""


@dataclass(frozen=True)
class Slice:
    """The rows whose history has `shortest` to `longest` events.

    Attributes:
        rows: number of rows.
        candidates: number of candidates in these rows.
        metrics: values by name, NaN where undefined.
    """

    shortest: int
    longest: int
    rows: int
    candidates: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class DiagnosticResults:
    """The results of `Diagnostics` over all ranks.

    Attributes:
        slices: slices by history length, from short to long; together they cover all rows.
        calibration: for each task with a binary loss, bins by rising prediction.
        pictures: attention of a few samples; empty on ranks that were asked for none.
    """

    slices: list[Slice]
    calibration: dict[str, list[ReliabilityBin]]
    pictures: list[AttentionPicture] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns the results as plain JSON types, without the pictures."""
        return {
            "slices": [
                {
                    "history": [part.shortest, part.longest],
                    "rows": part.rows,
                    "candidates": part.candidates,
                    "metrics": part.metrics,
                }
                for part in self.slices
            ],
            "calibration": {task: [bin._asdict() for bin in bins] for task, bins in self.calibration.items()},
        }


class Diagnostics:
    """Diagnoses one evaluation: call `watching` around each forward pass, `update` after it, then `results`.

    Args:
        model: the model, in evaluation mode.
        device: the model's device.
        pictures: number of samples of the first batch whose attention this rank records; 0 for none.
    """

    def __init__(self, model: Model, device: torch.device, pictures: int = 0):
        self._longest = slice_ends(model.pipeline.data.max_history_len)
        self._bounds = torch.tensor(self._longest[:-1], device=device)
        self._counts = torch.zeros(2, len(self._longest), dtype=torch.float64, device=device)
        self._metrics = [
            {name: metric.to(device) for name, metric in model.metrics().items()} for _ in self._longest
        ]
        self._reliability = {task: Reliability().to(device) for task in model.probabilities}
        self._num_pictures = pictures
        self._recorder: AttentionRecorder | None = None

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Records attention, if asked to, while the block runs the model's forward pass over one batch."""
        if self._recorder is not None or not self._num_pictures:
            yield
            return
        self._recorder = AttentionRecorder(batch, self._num_pictures)
        with self._recorder.watching():
            yield

    def update(self, rows: MetricRows, batch: Batch) -> None:
        """Adds the results of a batch.

        Args:
            rows: `Model.metric_rows` of the batch.
            batch: the batch, with its lengths on the model's device.
        """
        slices = torch.bucketize(batch.uih_lengths, self._bounds)
        counted = (batch.sample_weight > 0).double()
        self._counts[0].index_add_(0, slices, counted)
        self._counts[1].index_add_(0, slices, counted * batch.num_candidates)
        count = batch.candidate_timestamps.shape[0]
        of_candidate = torch.repeat_interleave(slices, batch.num_candidates, output_size=count)
        for number, metrics in enumerate(self._metrics):
            add_rows(metrics, _taken(rows, of_candidate == number))
        for task, reliability in self._reliability.items():
            reliability.update(*rows[task])

    def results(self) -> DiagnosticResults:
        """Returns the results over all ranks. Collective."""
        counts = self._counts.clone()
        if several_processes():
            dist.all_reduce(counts)
        first = [0, *(end + 1 for end in self._longest)]
        slices = [
            Slice(shortest, longest, int(rows), int(candidates), compute_all(metrics))
            for shortest, longest, rows, candidates, metrics in zip(
                first, self._longest, *counts.tolist(), self._metrics, strict=False
            )
        ]
        calibration = {task: reliability.bins() for task, reliability in self._reliability.items()}
        pictures = self._recorder.pictures() if self._recorder is not None else []
        return DiagnosticResults(slices, calibration, pictures)


def slice_ends(longest: int) -> list[int]:
    """Returns the longest history, in events, of each slice for histories of at most `longest` events.

    The first slice holds the rows without events. The last slice is at least as wide as all before it.
    """
    return [0, *(end for end in _ENDS if 2 * end <= longest), longest] if longest else [0]


def _taken(rows: MetricRows, chosen: Tensor) -> MetricRows:
    index = chosen.nonzero()[:, 0]
    return {task: tuple(column[index] for column in columns) for task, columns in rows.items()}
