"""Killed, stopped, damaged: a run that is started again continues as if nothing had happened, bit for bit."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from recsys import environment, files
from recsys.training.hooks.metrics_file import NAME
from tests.integration.runs import evaluate, finish, records, start, tensors, train, wait_for


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(folder) == 0
    assert sorted(records(folder)) == list(range(1, 17))
    return folder


def kill_at_step(folder: Path, step: int) -> None:
    process = start(folder)
    wait_for(lambda: max(records(folder), default=0) >= step, process)
    process.kill()
    process.communicate()


def kill_while_saving(folder: Path, after: int, delay: float = 0) -> None:
    """Kills `delay` seconds after a checkpoint behind step `after` has begun to be written."""
    process = start(folder)
    partial = (folder / "checkpoints").glob
    wait_for(lambda: any(int(x.name[6:14]) > after for x in partial(".step-*.partial")), process)
    time.sleep(delay)
    process.kill()
    process.communicate()


def assert_same_run(folder: Path, reference: Path) -> None:
    assert records(folder) == records(reference)
    assert records(folder, "evaluation") == records(reference, "evaluation")


def assert_same_so_far(folder: Path, reference: Path) -> None:
    expected = records(reference)
    assert all(record == expected[step] for step, record in records(folder).items())


def test_killed_at_a_step_and_while_saving(tmp_path, uninterrupted):
    """`test_killed_many_times` draws the steps."""
    kill_at_step(tmp_path, 5)
    assert_same_so_far(tmp_path, uninterrupted)
    kill_while_saving(tmp_path, after=9)
    assert_same_so_far(tmp_path, uninterrupted)
    assert list((tmp_path / "checkpoints").glob(".step-*.partial"))
    assert train(tmp_path) == 0
    assert_same_run(tmp_path, uninterrupted)
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    "average",
    [pytest.param("ema {decay: 0.8}", marks=pytest.mark.slow), "swa {start_step: 5 every_steps: 3}"],
)
def test_averages_survive_a_kill_and_leave_the_training_curve_alone(tmp_path, uninterrupted, average):
    """Killed before and behind an evaluation, for which the weights are exchanged."""
    averaged = f"train.weight_averaging={{{average}}}"
    assert train(tmp_path / "whole", averaged) == 0
    process = start(tmp_path / "killed", averaged)
    wait_for(lambda: max(records(tmp_path / "killed"), default=0) >= 7, process)
    process.kill()
    process.communicate()
    assert train(tmp_path / "killed", averaged) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert records(tmp_path / "whole") == records(uninterrupted)
    assert records(tmp_path / "whole", "evaluation") != records(uninterrupted, "evaluation")
    last = [tensors(tmp_path / name / "checkpoints" / "step-00000016") for name in ("whole", "killed")]
    plain = tensors(uninterrupted / "checkpoints" / "step-00000016")
    assert all(torch.equal(last[1][name], tensor) for name, tensor in last[0].items())
    assert all(torch.equal(last[0][name], tensor) for name, tensor in plain.items())
    parameters = {name.removeprefix("model.") for name in plain if name.startswith("model.")}
    assert last[0].keys() - plain.keys() == {f"average.{name}" for name in parameters}


def test_evaluation_of_a_saved_state_uses_its_averages(tmp_path):
    """Without `max_batches`, so that the command reads what training's evaluation reads."""
    averaged = ("train.weight_averaging={ema {decay: 0.8}}", "train.evaluation={every_steps: 6}")
    averaged += ("train.num_steps=6",)
    assert train(tmp_path, *averaged) == 0
    assert evaluate("--run-dir", str(tmp_path), "--split", "validation", "--checkpoint", "newest") == 0
    metrics = json.loads((tmp_path / "validation_metrics.json").read_text())["metrics"]
    assert metrics == records(tmp_path, "evaluation")[6]["metrics"]


def test_files_may_move_but_a_vocabulary_may_not_change(tmp_path, capsys):
    short = ("train.num_steps=2", "train.schedule.warmup_steps=0", "train.evaluation.every_steps=2")
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree("tests/data/kuairand/vocabulary", first)
    assert train(tmp_path / "run", *short, f"data.vocabulary_dir={first}") == 0
    first.rename(second)
    moved = ("train.num_steps=3", *short[1:], f"data.vocabulary_dir={second}")
    assert train(tmp_path / "run", *moved) == 0
    table = pq.read_table(second / "item_id.parquet")
    pq.write_table(table.take(list(range(table.num_rows))[::-1]), second / "item_id.parquet")
    capsys.readouterr()
    assert train(tmp_path / "run", *moved) == 3
    assert evaluate("--run-dir", str(tmp_path / "run"), "--split", "validation") == 3
    said = capsys.readouterr().err
    assert said.count("the vocabulary of item_id is not the one that the model was trained with") == 2


def test_other_versions_than_those_that_saved_are_a_warning(tmp_path, monkeypatch, caplog):
    short = ("train.schedule.warmup_steps=0", "train.evaluation.every_steps=2")
    assert train(tmp_path, *short, "train.num_steps=2") == 0
    then = environment.versions()
    monkeypatch.setattr(environment, "versions", lambda: then | {"torch": "9.9.0"})
    caplog.clear()
    assert train(tmp_path, *short, "train.num_steps=3") == 0
    assert f"it was saved with other versions (torch {then['torch']} then, 9.9.0 now); losses" in caplog.text
    assert [r.levelname for r in caplog.records if "other versions" in r.message] == ["WARNING"]


def test_a_folder_in_which_another_process_trains_is_left_alone(tmp_path, capsys):
    with files.locked(tmp_path / ".lock"):
        assert train(tmp_path) == 1
    assert f"{tmp_path}: another process is training in this folder" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "log.txt"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_many_times(tmp_path, uninterrupted, seed):
    draw = random.Random(seed)
    for step in sorted(draw.sample(range(1, 16), 3)):
        if draw.random() < 0.5:
            kill_at_step(tmp_path, step)
        else:
            kill_while_saving(tmp_path, step - 1)
        assert_same_so_far(tmp_path, uninterrupted)
    finish(start(tmp_path, "data.num_workers=1"))
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.slow
def test_killed_at_twenty_moments_of_writing(tmp_path, uninterrupted):
    """Each run is killed while a thread writes; the next one begins with the last whole state."""
    draw = random.Random(3)
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        kill_while_saving(folder, after=draw.randrange(12), delay=draw.uniform(0, 0.06))
        assert_same_so_far(folder, uninterrupted)
        assert train(folder) == 0
        assert_same_run(folder, uninterrupted)
        shutil.rmtree(folder)


def test_a_full_disk_ends_the_run_soon_and_the_state_before_is_whole(
    tmp_path, uninterrupted, monkeypatch, capsys
):
    write = files.write_manifest

    def full(folder: Path, hashed: object) -> None:
        if "step-00000004" in folder.name:
            raise OSError(28, "No space left on device")
        write(folder, hashed)

    monkeypatch.setattr(files, "write_manifest", full)
    assert train(tmp_path, "train.num_steps=16") == 1
    assert (
        f"no space left on {tmp_path}/checkpoints: the checkpoint's tensors have" in capsys.readouterr().err
    )
    assert 4 <= max(records(tmp_path)) < 16
    assert [x.name for x in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.setattr(files, "write_manifest", write)
    assert train(tmp_path) == 0
    assert_same_run(tmp_path, uninterrupted)


def test_stopped_by_a_signal_then_continued_from_a_damaged_checkpoint(tmp_path, uninterrupted, caplog):
    process = start(tmp_path)
    wait_for(lambda: max(records(tmp_path), default=0) >= 7, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=143)
    saved = sorted(x.name for x in (tmp_path / "checkpoints").iterdir())
    assert saved[-1] == f"step-{max(records(tmp_path)):08d}"
    assert f"stopped by signal 15, saved as {tmp_path}/checkpoints/{saved[-1]}" in output

    data = tmp_path / "checkpoints" / saved[-1] / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    assert train(tmp_path) == 0
    assert f"checkpoint {saved[-1]} is damaged and skipped: {data}" in caplog.text
    assert f"resuming from {tmp_path}/checkpoints/{saved[-2]}" in caplog.text
    assert_same_run(tmp_path, uninterrupted)


def test_a_signal_to_all_processes_of_a_run_stops_it_as_well(tmp_path):
    """`timeout` and torchrun send it to a whole group: readers are not to die before the state is saved."""
    many = ("data.num_workers=2", "data.prefetch_batches=1", "train.num_steps=5000")
    process = start(tmp_path, *many, new_group=True)
    wait_for(lambda: max(records(tmp_path), default=0) >= 7, process)
    os.killpg(process.pid, signal.SIGTERM)
    output = finish(process, code=143)
    assert "stopped by signal 15, saved as" in output
    assert "reader process died" not in output


def test_a_finished_run_says_so(uninterrupted, caplog):
    lines = (uninterrupted / NAME).read_text()
    assert train(uninterrupted) == 0
    assert "nothing to do: all 16 steps are done" in caplog.text
    assert (uninterrupted / NAME).read_text() == lines


def test_a_longer_run_warns_of_the_learning_rate_that_jumps(tmp_path, caplog):
    short = ("train.schedule={linear {}}", "train.evaluation.every_steps=9")
    assert train(tmp_path, "train.num_steps=2", *short) == 0
    assert train(tmp_path, "train.num_steps=3", *short, "train.log_every_steps=2") == 0
    warned = [message for message in caplog.messages if message.startswith("train.schedule")]
    assert warned == [
        "train.schedule: the run had 2 steps when it was saved and has 3 now, so the next step's learning "
        "rate is 0.333 of its peak instead of 0. A run that may grow wants constant"
    ]


def test_another_config_is_not_continued(uninterrupted, capsys):
    assert train(uninterrupted, "model.embedding_dim=32", "data.batch_size=8") == 2
    shown = capsys.readouterr().err
    assert f"data.batch_size: 16 in {uninterrupted}, 8 now" in shown
    assert f"model.embedding_dim: 16 in {uninterrupted}, 32 now" in shown


def test_evaluation_and_saving_leave_no_trace_in_the_training_curve(tmp_path, uninterrupted):
    assert train(tmp_path, "train.evaluation.every_steps=5", "train.checkpoint.every_steps=16") == 0
    assert records(tmp_path) == records(uninterrupted)
    assert sorted(records(tmp_path, "evaluation")) == [5, 10, 15, 16]


def test_patience_ends_a_run_and_the_best_state_is_kept(tmp_path, caplog):
    stubborn = ("train.dense_optimizer.adamw.lr=1e-12", "train.sparse_optimizer.row_wise_adagrad.lr=1e-12")
    frequent = ("train.evaluation.every_steps=1", "train.evaluation.patience=3")
    assert train(tmp_path, *stubborn, *frequent) == 0
    assert sorted(records(tmp_path, "evaluation")) == [1, 2, 3, 4]
    assert "3 evaluations brought no improvement" in caplog.text
    assert (tmp_path / "checkpoints" / "step-00000001").exists()


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, caplog):
    assert train(tmp_path, "train.dense_optimizer.adamw.lr=1e30", "train.checkpoint.every_steps=16") == 4
    assert "step 2: the loss of task is_click is " in caplog.text
    assert not list((tmp_path / "checkpoints").glob("step-*"))
