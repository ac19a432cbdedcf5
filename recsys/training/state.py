"""Defines the part of a run's state that is not tensors and is stored as JSON.

`SavedState` is the content of a checkpoint's `state.json`. Its `Progress` changes with every step. It also
holds the state of each rank's random number generators.
"""

import base64
import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from recsys.data.counts import Counts
from recsys.data.sources.base import FileMark


@dataclass
class Best:
    """The best evaluation so far: the deciding metric, its value, and the step that reached it."""

    metric: str
    value: float
    step: int


@dataclass
class Window:
    """Losses and counts since the last log line. Saving them lets a resumed run log the same numbers.

    Attributes:
        batches: number of batches per rank in the sums.
        loss: sum of the weighted losses.
        losses: sum of the losses by task.
        counts: rows of all ranks that were left out or cut.
    """

    batches: int = 0
    loss: float = 0.0
    losses: dict[str, float] = field(default_factory=dict)
    counts: Counts = Counts()

    def add(self, loss: float, losses: dict[str, float], counts: Counts) -> None:
        """Adds one batch."""
        self.batches += 1
        self.counts = self.counts.plus(counts)
        self.loss += loss
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + value

    def means(self) -> "Window":
        """Returns the window with losses divided by the number of batches."""
        n = self.batches
        losses = {name: value / n for name, value in self.losses.items()}
        return Window(n, self.loss / n, losses, self.counts)


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        step: optimizer steps done.
        epoch, next_batch: the first batch of the data plan that no rank has trained on.
        samples: rows trained on, over all ranks and epochs.
        best: the best evaluation so far.
        evaluations_without_gain: number of evaluations since `best`, which patience limits.
        window: losses and counts not yet logged.
        earlier_batches: batches of an earlier run that the optimizer states have seen, if a warm start took
            them.
    """

    step: int = 0
    epoch: int = 0
    next_batch: int = 0
    samples: int = 0
    best: Best | None = None
    evaluations_without_gain: int = 0
    window: Window = field(default_factory=Window)
    earlier_batches: int = 0


@dataclass
class Inputs:
    """Fingerprints of the inputs of a run.

    They cover its training files in order, the vocabulary of each table (see `vocabulary.fingerprints`), the
    items (see `item_catalogue.fingerprint`), and their semantic ids (see `data.codes.fingerprint`).
    """

    files: list[FileMark]
    vocabularies: dict[str, str]
    items: str | None = None
    codes: str | None = None


@dataclass
class SavedState:
    """Everything in a checkpoint but its tensors. Config and world size determine how tables were sharded.

    Attributes:
        progress: progress of the run.
        rng: state of each rank's random number generators, see `capture_rng`.
        inputs: fingerprints of the files that the run read.
        config: text of the resolved config.
        versions: `environment.versions` of the process that saved.
        world_size: number of ranks.
    """

    progress: Progress
    rng: list[dict[str, Any]]
    inputs: Inputs
    config: str
    versions: dict[str, str]
    world_size: int

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values that `typed_json.parse` can read."""
        return asdict(self)


def seed_everything(seed: int) -> None:
    """Seeds every random number generator of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng(device: torch.device) -> dict[str, Any]:
    """Returns the state of this process's random number generators as JSON values.

    These are Python's, NumPy's and torch's generators and, if `device` is a GPU, its CUDA generator.
    """
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [keys.tolist(), position, has_gauss, cached],
        "torch": _to_text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Restores random number generators from `capture_rng`; generators that were not captured do not change.

    Raises:
        ValueError: `state` is not a result of `capture_rng`.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_to_bytes(state["torch"]))
        if device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(_to_bytes(state["cuda"]), device)
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"not a saved state of random number generators ({error})") from error


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _to_bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
