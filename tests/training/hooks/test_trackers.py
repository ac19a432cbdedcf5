"""Weights & Biases and MLflow get what a run records, and cannot disturb it.

Each test runs on a stand-in for the library, and on the library itself if it is installed: offline, and with
a store in a file.
"""

import importlib.util
import inspect
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from recsys import protos as pb
from recsys.config import check_libraries
from recsys.config.checks.train import is_installed
from recsys.errors import ConfigError
from recsys.training.hooks import (
    Evaluated,
    MlflowHook,
    Outcome,
    Run,
    SplitMetrics,
    Trained,
    WandbHook,
    tracker,
)
from recsys.training.state import Best
from recsys.training.throughput import Rates
from tests.training.hooks import stand_ins, wandb_file

CONFIG = "train { num_steps: 10 }"
SETTINGS = {"train.lr": 0.25, "model.tasks[0].weight": 2.0, "mixer": "hstu"} | {
    f"model.layers[{i}].dropout": i / 200 for i in range(150)
}
LIBRARIES = ["stand-in", "library"]


def skip_unless_installed(library: str, module: str) -> None:
    if library == "library" and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install 'generative-recsys[{module}]'")


def run_of(folder: Path, first_step: int = 0) -> Run:
    return Run(folder, CONFIG, first_step, 10, hyperparameters=SETTINGS)


def record(hook: Any, *steps: int) -> None:
    """Two records a step: loss = step / 2, ndcg@10 = step / 100, and a metric that is not defined."""
    for step in steps:
        rates = Rates(1, 20, 300, 0.125, flop_per_s=2e12, mfu=0.5)
        hook.trained(Trained(step, 0, step / 2, {"a": 0.25}, {"dense": 0.1}, 2.0, rates, 9.0, 3 * 2**20))
        metrics = {"ndcg@10": step / 100, "gauc": math.nan}
        hook.evaluated(Evaluated(step, metrics, True, 0.1))


def row(step: int) -> dict[str, float]:
    """The numbers that a service must have of a step."""
    return {
        "train/loss": step / 2,
        "train/loss/a": 0.25,
        "train/grad_norm": 2.0,
        "lr/dense": 0.1,
        "speed/samples_per_s": 20,
        "speed/tokens_per_s": 300,
        "speed/tflop_per_s": 2,
        "speed/mfu": 0.5,
        "speed/data_wait": 0.125,
        "memory/peak_mib": 3,
        "validation/ndcg@10": step / 100,
    }


OUTCOME = Outcome(10, "all 10 steps are done", Path(), Best("ndcg@10", 0.1, 10))


class WandbRuns:
    """The runs of a test as Weights & Biases has them, in the order of their starts."""

    def __init__(self, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.service = folder, None
        monkeypatch.setenv("WANDB_MODE", "offline")
        if library == "stand-in":
            self.service = stand_ins.WandbService()
            monkeypatch.setitem(sys.modules, "wandb", self.service.module)

    def read(self) -> list[wandb_file.Recorded]:
        if self.service is None:
            paths = self.folder.glob("wandb/offline-run-*/*.wandb")
            return [wandb_file.read(path) for path in sorted(paths, key=lambda path: path.stat().st_ctime_ns)]
        return [
            wandb_file.Recorded(
                run.arguments["id"],
                run.arguments["project"],
                run.arguments["config"] or {},
                run.rows,
                run.summary,
                [str(path) for path in run.saved],
                run.exit_code,
            )
            for run in self.service.runs
        ]


@pytest.fixture(params=LIBRARIES)
def wandb_runs(request, tmp_path, monkeypatch) -> WandbRuns:
    skip_unless_installed(request.param, "wandb")
    return WandbRuns(request.param, tmp_path, monkeypatch)


@pytest.fixture
def wandb_service(tmp_path, monkeypatch) -> stand_ins.WandbService:
    """The stand-in, online."""
    runs = WandbRuns("stand-in", tmp_path, monkeypatch)
    monkeypatch.delenv("WANDB_MODE")
    return runs.service


def test_wandb_has_settings_records_and_outcome_and_goes_on_under_the_same_id(wandb_runs, tmp_path):
    hook = WandbHook(pb.WandbHook(project="shop"))
    hook.started(run_of(tmp_path))
    record(hook, 5, 6)
    hook.finished(Outcome(6, "signal 15 stopped the run", Path(), signal=15))
    hook.close()
    hook = WandbHook(pb.WandbHook(project="shop"))
    hook.started(run_of(tmp_path, 6))
    record(hook, 10)
    hook.finished(OUTCOME)
    hook.close()
    WandbHook(pb.WandbHook(project="shop")).tested(SplitMetrics(tmp_path, "test", 10, {"ndcg@10": 0.08}))
    first, second, tested = wandb_runs.read()
    assert {first.run_id, second.run_id, tested.run_id} == {(tmp_path / "wandb.id").read_text().strip()}
    assert first.project == "shop"
    assert SETTINGS.items() <= first.config.items()
    assert first.files[-1] == "config.resolved"
    assert {step: pytest.approx(row(step)) for step in (5, 6)} == first.rows
    assert {10: pytest.approx(row(10))} == second.rows
    assert first.summary["outcome"] == "signal 15 stopped the run"
    assert (first.exit_code, second.exit_code, tested.exit_code) == (143, 0, 0)
    expected = {"outcome": "all 10 steps are done", "best/ndcg@10": 0.1, "best/step": 10}
    assert expected.items() <= second.summary.items()
    assert {"test/ndcg@10": 0.08, "test/step": 10}.items() <= tested.summary.items()


def test_wandb_gets_no_step_twice(wandb_service, tmp_path):
    """A run that was killed repeats the steps behind its last saved state."""
    for first_step, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        hook = WandbHook(pb.WandbHook())
        hook.started(run_of(tmp_path, first_step))
        record(hook, *steps)
        hook.close()
    assert [sorted(run.rows) for run in wandb_service.runs] == [[1, 2, 3], [4]]
    assert wandb_service.runs[0].exit_code == 1, "it ended without an outcome: by an error"


@pytest.mark.parametrize("fault", ["has_key", "answers"])
def test_wandb_records_offline_if_there_is_no_key_or_no_answer(wandb_service, tmp_path, caplog, fault):
    setattr(wandb_service, fault, False)
    hook = WandbHook(pb.WandbHook())
    hook.started(run_of(tmp_path))
    record(hook, 1)
    hook.finished(OUTCOME)
    hook.close()
    (run,) = wandb_service.runs
    assert run.offline and run.rows[1] == row(1) and run.exit_code == 0
    (warning,) = (entry.message for entry in caplog.records if entry.levelname == "WARNING")
    assert "recorded offline" in warning


class MlflowRun(NamedTuple):
    """A run with a client that reads it."""

    client: Any
    run_id: str

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in self.client.get_metric_history(self.run_id, name)]


@pytest.fixture(params=LIBRARIES)
def mlflow_uri(request, tmp_path, monkeypatch) -> str:
    skip_unless_installed(request.param, "mlflow")
    if request.param == "stand-in":
        for name, module in stand_ins.MlflowStore().modules.items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path}/store.db"


def test_mlflow_has_settings_records_and_outcome_and_goes_on_under_the_same_id(mlflow_uri, tmp_path):
    from mlflow import MlflowClient

    config = pb.MlflowHook(experiment="shop", tracking_uri=mlflow_uri)
    hook = MlflowHook(config)
    hook.started(run_of(tmp_path))
    record(hook, 5, 6)
    hook.close()
    client = MlflowClient(tracking_uri=mlflow_uri)
    run = MlflowRun(client, (tmp_path / "mlflow.id").read_text().strip())
    written = client.get_run(run.run_id)
    assert (written.info.status, written.info.run_name) == ("FAILED", tmp_path.name)
    shop = client.get_experiment_by_name("shop").experiment_id
    assert written.info.experiment_id == shop

    hook = MlflowHook(config)
    hook.started(Run(tmp_path, CONFIG, 6, 12, hyperparameters=SETTINGS | {"train.lr": 0.5, "new": 1}))
    record(hook, 10)
    hook.finished(OUTCOME)
    hook.close()
    MlflowHook(config).tested(SplitMetrics(tmp_path, "test", 10, {"ndcg@10": 0.08, "gauc": math.nan}))
    MlflowHook(config).tested(SplitMetrics(tmp_path, "validation", 10, {"ndcg@10": 0.5}))
    for name in row(5):
        expected = [(step, row(step)[name]) for step in (5, 6, 10)]
        assert run.points(name.replace("@", "_at_")) == expected, name
    assert run.points("best/ndcg_at_10") == [(10, 0.1)]
    assert run.points("test/ndcg_at_10") == [(10, 0.08)]
    written = client.get_run(run.run_id)
    params = {name.replace("[", "_").replace("]", "_"): str(value) for name, value in SETTINGS.items()}
    assert written.data.params == params | {"new": "1"}
    assert (written.info.status, written.data.tags["outcome"]) == ("FINISHED", "all 10 steps are done")


def test_mlflow_has_the_config_and_makes_a_new_run_if_it_has_lost_the_old_one(mlflow_uri, tmp_path, caplog):
    from mlflow import MlflowClient

    (tmp_path / "mlflow.id").write_text("0" * 32)
    hook = MlflowHook(pb.MlflowHook(tracking_uri=mlflow_uri))
    hook.started(run_of(tmp_path))
    hook.finished(Outcome(6, "signal 15 stopped the run", Path(), signal=15))
    hook.close()
    run_id = (tmp_path / "mlflow.id").read_text().strip()
    assert run_id != "0" * 32 and "MLflow no longer has run 00000" in caplog.text
    written = MlflowClient(tracking_uri=mlflow_uri).get_run(run_id)
    assert written.info.status == "KILLED"
    texts = getattr(written, "files", None)  # of the stand-in
    if texts is None:
        (file,) = tmp_path.glob("mlruns/*/*/artifacts/config.resolved")
        texts = {file.name: file.read_text()}
    assert texts == {"config.resolved": CONFIG}


def test_the_stand_ins_have_the_signatures_of_the_libraries():
    skip_unless_installed("library", "wandb")
    skip_unless_installed("library", "mlflow")
    import mlflow
    import wandb

    service = stand_ins.WandbService()
    pairs = [
        (getattr(service, name), getattr(wandb, name)) for name in ("setup", "login", "init", "teardown")
    ]
    pairs += [(getattr(stand_ins.WandbRun, n), getattr(wandb.Run, n)) for n in ("log", "save", "finish")]
    methods = [name for name in vars(stand_ins._Client) if not name.startswith("_")]
    pairs += [(getattr(stand_ins._Client, name), getattr(mlflow.MlflowClient, name)) for name in methods]
    for stand_in, original in pairs:
        assert inspect.signature(stand_in).parameters.keys() <= inspect.signature(original).parameters.keys()
    settings = inspect.signature(stand_ins.WandbService.settings).parameters
    assert settings.keys() <= wandb.Settings.model_fields.keys()


class Unreliable(tracker.Tracker):
    """A tracker whose requests the test decides on."""

    service, id_file = "The service", "unreliable.id"

    def __init__(self, connect=lambda: None, log=lambda step: None):
        super().__init__()
        self._connect, self._log, self.ended = connect, log, False

    def connect(self, folder, run):
        self._connect()

    def log(self, scalars, step, seconds):
        self._log(step)

    def disconnect(self, outcome, *, training):
        self.ended = True


def warnings(caplog) -> list[str]:
    return [entry.message for entry in caplog.records if entry.levelname == "WARNING"]


def test_a_request_that_fails_is_told_once_and_the_next_ones_are_made(tmp_path, caplog):
    sent = []

    def log(step):
        if step in (2, 3):
            raise KeyError("broken")
        sent.append(step)

    hook = Unreliable(log=log)
    hook.started(run_of(tmp_path))
    record(hook, 1, 2, 3, 4)
    hook.finished(OUTCOME)
    hook.close()
    assert sent == [1, 1, 4, 4] and hook.ended
    first, last = warnings(caplog)
    assert first.startswith("The service: KeyError: 'broken'.") and "did not receive all records" in last


def test_a_service_that_comes_back_gets_all_records(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracker, "RETRY_AFTER", 0.01)
    attempts, sent = [], []

    def connect():
        attempts.append(1)
        if len(attempts) < 4:
            raise ConnectionError("down")

    hook = Unreliable(connect, sent.append)
    hook.started(run_of(tmp_path))
    record(hook, 1, 2)
    deadline = time.monotonic() + 20
    while len(sent) < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    hook.close()
    assert sent == [1, 1, 2, 2] and len(attempts) == 4
    assert warnings(caplog)[0].startswith("The service: ConnectionError: down.")


def test_nobody_waits_for_a_service_that_hangs(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracker, "LONGEST_WAIT", 0.05)
    hook = Unreliable(log=lambda step: time.sleep(0.5))
    began = time.monotonic()
    hook.started(run_of(tmp_path))
    record(hook, 1, 2, 3)
    hook.close()
    assert time.monotonic() - began < 0.4
    (warning,) = warnings(caplog)
    assert warning.startswith("The service did not accept all records within 0 s")


def test_a_service_that_never_answered_does_not_hold_the_end(tmp_path, caplog):
    def connect():
        raise ConnectionError("down")

    hook = Unreliable(connect)
    hook.started(run_of(tmp_path))
    record(hook, 1)
    hook.close()
    assert not hook.ended and "did not receive all records" in warnings(caplog)[-1]


@pytest.mark.parametrize("content", [b"", b"a/b", b"\xff\xfe", b"x" * 500])
def test_a_damaged_id_is_none(tmp_path, caplog, content):
    (tmp_path / "unreliable.id").write_bytes(content)
    assert Unreliable().read_id(tmp_path) is None
    assert "unreliable.id: holds no valid run id" in caplog.text


def test_a_run_without_an_id_gets_no_test_metrics(tmp_path):
    hook = Unreliable(connect=lambda: pytest.fail("it connects"))
    hook.tested(SplitMetrics(tmp_path, "test", 3, {"auc": 0.5}))
    assert hook._thread is None


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_a_finding_with_the_line_to_type(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    pipeline = pb.Pipeline()
    getattr(pipeline.train.hooks.add(), name).SetInParent()
    with pytest.raises(ConfigError) as error:
        check_libraries(pipeline, {f"train.hooks[0].{name}": "x.config:7"})
    assert str(error.value) == (
        f"x.config:7: train.hooks[0].{name}: the library is not installed; type: python -m pip install "
        f"'generative-recsys[{name}]'"
    )


def test_a_folder_with_the_name_of_a_library_is_none(monkeypatch, tmp_path):
    """The client of Weights & Biases leaves a folder `wandb` behind."""
    (tmp_path / "left_behind").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("left_behind") is not None
    assert not is_installed("left_behind") and is_installed("json")
