"""What a run tells those who watch it.

A hook overrides the methods it cares for. It sees values on the host, after the step, and changes nothing.
"""

from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from recsys.data.counts import Counts
from recsys.training.diagnostics import Findings
from recsys.training.state import Best
from recsys.training.throughput import Rates


@dataclass(frozen=True)
class Run:
    """What is known when training starts.

    Attributes:
        folder: run folder.
        config_text: resolved config in text format.
        first_step: steps done already; above 0 when the run continues.
        total_steps: steps when it ends.
        facts: lines about the run (device, processes, parameters), by topic.
        hyperparameters: what distinguishes runs of a sweep, by path in the config.
        splits: rows beside those for training: "validation", "test".
    """

    folder: Path
    config_text: str
    first_step: int
    total_steps: int
    facts: dict[str, str] = field(default_factory=dict)
    hyperparameters: dict[str, bool | int | float | str] = field(default_factory=dict)
    splits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """Means since the last record.

    Attributes:
        step: the last of them. epoch: it was in this epoch, from 0.
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
    """A closer look at an evaluation: at the last one, and at that of the best state.

    Attributes:
        step: of the state that was evaluated; the best one's may be behind the run's.
        findings: slices, calibration, pictures of attention.
    """

    step: int
    findings: Findings


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        step: steps done.
        reason: why it ended, a sentence's middle: "all 500 steps are done".
        checkpoint: newest state.
        best: best evaluation, if there was one.
        signal: number of the signal that ended it, else 0.
    """

    step: int
    reason: str
    checkpoint: Path
    best: Best | None = None
    signal: int = 0


class Hook:
    """Base of the hooks; does nothing."""

    def started(self, run: Run) -> None:
        """Before the first step."""

    def stepped(self, step: int) -> None:
        """After each step."""

    def trained(self, record: Trained) -> None:
        """Every `log_every_steps` steps."""

    def evaluated(self, record: Evaluated) -> None:
        """After each evaluation."""

    def diagnosed(self, record: Diagnosed) -> None:
        """After a closer look at an evaluation."""

    def saved(self, path: Path) -> None:
        """After each saved state."""

    def finished(self, outcome: Outcome) -> None:
        """After the last step; not when the run ends by an error."""

    def close(self) -> None:
        """Always, last: gives back files and the terminal."""
