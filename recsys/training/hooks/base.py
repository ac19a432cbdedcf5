"""Training events that hooks can observe.

A hook overrides the methods of the events it needs. It receives values on the host, after the step, and must
not change anything.
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
    """The facts that are known when training starts.

    Attributes:
        folder: the run folder.
        config_text: the resolved config in text format.
        first_step: steps already done; above 0 if the run continues.
        total_steps: steps of the whole run.
        facts: lines about the run (device, processes, parameters), by topic.
        hyperparameters: settings that distinguish the runs of a sweep, by path in the config.
        splits: splits of the config other than "train": "validation", "test".
        baselines: metrics of each untrained baseline on the validation rows, by name of the baseline.
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
    """A record of training: means since the previous record, and the state of the run.

    Attributes:
        step: last step of the interval.
        epoch: epoch of that step, from 0.
        loss: weighted sum of the tasks' losses.
        losses: loss by task.
        lr: learning rates of the last step, by optimizer.
        grad_norm: norm of the dense gradients of the last step, before clipping.
        rates: speed over the interval.
        seconds_left: seconds until the run ends at this speed, without evaluations.
        memory: peak memory of this process so far in bytes, on its GPU or, without a GPU, in RAM.
        history_lengths: int64 [rows], number of events of each row that this rank trained on in the interval.
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
    """A record of one evaluation.

    Attributes:
        step: steps done at the evaluation.
        metrics: the model's metrics by name, `loss` and `loss/<task>`; NaN where undefined.
        best: whether this evaluation is the best so far.
        seconds: duration of the evaluation.
        counts: rows of all ranks that were left out or cut.
    """

    step: int
    metrics: dict[str, float]
    best: bool
    seconds: float
    counts: Counts = Counts()


@dataclass(frozen=True)
class Diagnosed:
    """Diagnostics of an evaluation. A run makes them for its last evaluation and for its best state.

    Attributes:
        step: step of the evaluated state; that of the best state may be lower than the run's.
        results: slices, calibration, pictures of attention.
    """

    step: int
    results: DiagnosticResults


@dataclass(frozen=True)
class Outcome:
    """Describes the end of a run.

    Attributes:
        step: steps done.
        reason: why the run ended, as a clause such as "all 500 steps are done".
        checkpoint: folder of the newest saved state.
        best: the best evaluation, if there was any.
        signal: number of the signal that ended the run, else 0.
    """

    step: int
    reason: str
    checkpoint: Path
    best: Best | None = None
    signal: int = 0


@dataclass(frozen=True)
class SplitMetrics:
    """Metrics of a saved state, which `recsys evaluate` computes in a separate process after training.

    Attributes:
        folder: the run folder.
        split: "test", "validation" or "train".
        step: step of the evaluated state.
        metrics: values by name, NaN where undefined.
    """

    folder: Path
    split: str
    step: int
    metrics: dict[str, float]


class Hook:
    """Base class of hooks. Its methods do nothing."""

    def started(self, run: Run) -> None:
        """Is called before the first step."""

    def stepped(self, step: int) -> None:
        """Is called after each step."""

    def trained(self, record: Trained) -> None:
        """Is called every `log_every_steps` steps."""

    def evaluated(self, record: Evaluated) -> None:
        """Is called after each evaluation."""

    def diagnosed(self, record: Diagnosed) -> None:
        """Is called after the diagnostics of an evaluation."""

    def copied(self, step: int) -> None:
        """Is called when training goes on after a state was copied, which is written meanwhile."""

    def saved(self, path: Path) -> None:
        """Is called when a state has been written, with its folder; there may have been steps since."""

    def finished(self, outcome: Outcome) -> None:
        """Is called after the last step, unless an error ends the run."""

    def tested(self, record: SplitMetrics) -> None:
        """Is called after `recsys evaluate`, which calls no other method, not even `close`."""

    def close(self) -> None:
        """Is called last, even after an error, to release files and the terminal."""
