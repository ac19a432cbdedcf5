"""Training events that hooks can observe.

A hook overrides the methods of the events it needs. It gets values on the host, after the step, and must not
change anything.
"""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from recsys.data.counts import Counts
from recsys.training.diagnostics import DiagnosticResults
from recsys.training.state import Best
from recsys.training.throughput import Rates


@dataclass(frozen=True)
class Run:
    """Facts that are known when training starts.

    Attributes:
        folder: run folder.
        config_text: resolved config in text format.
        first_step: steps done already; above 0 when the run continues.
        total_steps: steps when it ends.
        facts: lines about the run (device, processes, parameters), by topic.
        hyperparameters: what distinguishes runs of a sweep, by path in the config.
        splits: rows beside those for training: "validation", "test".
        baselines: metrics on the validation rows of models without training, by name of the baseline.
    """

    folder: Path
    config_text: str
    first_step: int
    total_steps: int
    facts: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    splits: tuple[str, ...] = ()
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """Means since the last record.

    Attributes:
        step: last step of the interval. epoch: epoch of that step, from 0.
        loss: weighted sum over tasks. losses: by task.
        lr: learning rates of the last step, by optimizer.
        grad_norm: of the dense gradients of the last step, before clipping.
        rates: speed.
        seconds_left: at this speed, without evaluations.
        memory: bytes that this process held at most so far, on its GPU or, without one, in RAM.
        history_lengths: int64 [rows], events of each row that this rank trained on since the last record.
        counts: rows of all ranks that were left out or cut.
    """

    step: int
    epoch: int
    loss: float
    losses: dict[str, float]
    lr: dict[str, float]
    grad_norm: float
    rates: Rates
    seconds_left: float
    memory: int = 0
    history_lengths: Tensor | None = None
    counts: Counts = Counts()


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: metrics by name, NaN where undefined.

    Attributes:
        step: after this many steps.
        metrics: as the model names them, `loss` and `loss/<task>`.
        best: it is the best so far.
        seconds: time it took.
        counts: rows of all ranks that were left out or cut.
    """

    step: int
    metrics: dict[str, float]
    best: bool
    seconds: float
    counts: Counts = Counts()


@dataclass(frozen=True)
class Diagnosed:
    """Diagnostics of an evaluation: of the last one, and of the best state's.

    Attributes:
        step: of the state that was evaluated; the best one's may be behind the run's.
        results: slices, calibration, pictures of attention.
    """

    step: int
    results: DiagnosticResults


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        step: steps done.
        reason: why it ended, to go into a sentence: "all 500 steps are done".
        checkpoint: newest state.
        best: best evaluation, if there was one.
        signal: number of the signal that ended it, else 0.
    """

    step: int
    reason: str
    checkpoint: Path
    best: Best | None = None
    signal: int = 0


@dataclass(frozen=True)
class SplitMetrics:
    """Metrics of a saved state that `recsys evaluate` computed, in a process of its own after training.

    Attributes:
        folder: run folder.
        split: "test", "validation" or "train".
        step: of the state that was evaluated.
        metrics: by name, NaN where undefined.
    """

    folder: Path
    split: str
    step: int
    metrics: dict[str, float]


class Hook:
    """Base class of hooks, whose methods do nothing."""

    def started(self, run: Run) -> None:
        """Before the first step."""

    def stepped(self, step: int) -> None:
        """After each step."""

    def trained(self, record: Trained) -> None:
        """Every `log_every_steps` steps."""

    def evaluated(self, record: Evaluated) -> None:
        """After each evaluation."""

    def diagnosed(self, record: Diagnosed) -> None:
        """After the diagnostics of an evaluation."""

    def saved(self, path: Path) -> None:
        """After each saved state."""

    def finished(self, outcome: Outcome) -> None:
        """After the last step; not when the run ends by an error."""

    def tested(self, record: SplitMetrics) -> None:
        """After `recsys evaluate`, which calls no other method, not even `close`."""

    def close(self) -> None:
        """Last, in any case: releases files and the terminal."""
