"""The loop: results that are read while later batches are under way change nothing, and steps do not wait."""

from pathlib import Path

import pytest
import torch

from recsys import config
from recsys.models.base import Losses
from recsys.models.tasks import TaskLosses
from recsys.training import trainer
from recsys.training.distributed import process_group
from recsys.training.hooks import Hook
from recsys.training.session import open_session
from tests.integration.runs import CONFIG, records, tensors, train

SHORT = ("train.num_steps=8", "train.schedule.warmup_steps=0", "train.log_every_steps=3")
ACCUMULATED = (*SHORT, "train.accumulate_batches=2", "train.checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def at_once(tmp_path_factory) -> Path:
    """A run that reads the results of each batch before the next one."""
    folder = tmp_path_factory.mktemp("at_once")
    assert train(folder, *ACCUMULATED) == 0
    return folder


@pytest.mark.parametrize("batches", [1, 3])
def test_results_that_are_read_late_change_nothing(tmp_path, at_once, monkeypatch, batches):
    """With two batches a step: one is read in the middle of the step, the other ones behind it."""
    monkeypatch.setitem(trainer.LATE_BATCHES, "cpu", batches)
    assert train(tmp_path, *ACCUMULATED) == 0
    for kind, steps in (("train", [3, 6, 8]), ("evaluation", [6, 8])):
        late = records(tmp_path, kind)
        assert sorted(late) == steps
        assert late == records(at_once, kind)
    first, second = (run / "checkpoints" / "step-00000008" for run in (at_once, tmp_path))
    assert (first / "state.json").read_text() == (second / "state.json").read_text()
    saved = tensors(second)
    assert all(torch.equal(saved[name], tensor) for name, tensor in tensors(first).items())


def test_no_state_is_saved_behind_a_loss_that_is_not_finite(tmp_path, monkeypatch, capsys):
    """The broken result of step 3 would be read during step 5 by itself; step 4 is to be saved."""
    calls, compute = [0], TaskLosses.forward

    def spoilt(self, outputs, batch) -> Losses:
        calls[0] += 1
        losses = compute(self, outputs, batch)
        factor = float("nan") if calls[0] == 3 else 1.0
        return Losses(losses.names, losses.sums * factor, losses.counts, losses.weights)

    monkeypatch.setattr(TaskLosses, "forward", spoilt)
    monkeypatch.setitem(trainer.LATE_BATCHES, "cpu", 2)
    assert train(tmp_path, *SHORT, "train.log_every_steps=100", "train.checkpoint.every_steps=2") == 4
    assert calls[0] == 4
    assert "step 3: the loss of task is_click is nan" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


class _NoWaiting(Hook):
    """Makes every wait for the device an error, from behind step 3 to behind step 7."""

    def stepped(self, step: int) -> None:
        if step in (3, 7):
            torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")


@pytest.mark.gpu
def test_steps_do_not_wait_for_the_device(tmp_path):
    """With sharded tables TorchRec waits for the sizes of an exchange, though not for the computation."""
    chosen = [*SHORT, "train.log_every_steps=100", "train.evaluation={every_steps: 8}"]
    chosen += ["train.checkpoint.every_steps=8", "model.embedding.placement=REPLICATED"]
    pipeline = config.prepare(CONFIG, chosen).pipeline
    with process_group() as processes:
        try:
            session = open_session(pipeline, tmp_path, processes)
            trainer.Trainer(session, [_NoWaiting()]).run()
            del session
        finally:
            torch.cuda.set_sync_debug_mode("default")
