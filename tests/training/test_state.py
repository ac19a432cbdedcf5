"""Progress and random states survive JSON without losing a bit."""

import json
import random
from dataclasses import asdict

import numpy as np
import torch

from recsys import typed_json
from recsys.data.counts import Counts
from recsys.training.state import Best, Progress, Window, capture_rng, restore_rng, seed_everything

CPU = torch.device("cpu")


def draw() -> list[float]:
    """One number of each generator; the Gaussian ones keep a second number back."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_generators_go_on_where_they_were_captured():
    seed_everything(7)
    draw()
    state = json.loads(json.dumps(capture_rng(CPU)))
    expected = [draw() for _ in range(3)]
    seed_everything(8)
    draw()
    restore_rng(state, CPU)
    assert [draw() for _ in range(3)] == expected


def test_seeding_repeats_every_generator():
    seed_everything(2**40 + 3)
    first = draw()
    seed_everything(2**40 + 3)
    assert draw() == first


def test_progress_comes_back_bit_for_bit():
    progress = Progress(step=3, epoch=1, next_batch=7, samples=99, evaluations_without_gain=2)
    progress.best = Best("auc", 0.1 + 0.2, 2)
    progress.window.add(1 / 3, {"a": 0.1}, Counts())
    progress.window.add(1 / 7, {"a": 0.7}, Counts(1, 2, 3))
    again = typed_json.parse(json.dumps(asdict(progress)), Progress)
    assert again == progress
    assert again.window.losses["a"] == 0.1 + 0.7
    assert typed_json.parse(json.dumps(asdict(Progress())), Progress) == Progress()


def test_a_window_holds_means():
    window = Window()
    window.add(1.0, {"a": 2.0, "b": 4.0}, Counts(0, 5, 1))
    window.add(2.0, {"a": 4.0, "b": 0.0}, Counts(2, 3, 0))
    assert window.means() == Window(2, 1.5, {"a": 3.0, "b": 2.0}, Counts(2, 8, 1))


def test_a_state_from_before_rows_were_counted_is_read():
    saved = asdict(Progress())
    del saved["window"]["counts"]
    assert typed_json.parse(json.dumps(saved), Progress) == Progress()
