"""Stand-ins for the client libraries of Weights & Biases and MLflow, which tests need not have installed.

They take the calls of the hooks, with the signatures of the libraries and the rules of the services that the
hooks must keep. `test_trackers` runs on the libraries as well where they are installed, and compares
signatures.
"""

import os
import re
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def module(name: str, **attributes: Any) -> ModuleType:
    """A module that `importlib.util.find_spec` takes for an installed one."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None, origin="stand-in")
    made.__dict__.update(attributes)
    return made


class WandbError(Exception):
    """Stands for `wandb.Error`."""


class WandbRun:
    """A run; `rows` are by step, as the service keeps them."""

    def __init__(self, service: "WandbService", mode: str, directory: str, arguments: dict[str, Any]):
        self.offline = mode == "offline"
        self.url = None if self.offline else f"https://service/{arguments['id']}"
        self.dir = str(Path(directory) / "wandb" / f"{mode}-{arguments['id']}" / "files")
        Path(self.dir).mkdir(parents=True, exist_ok=True)
        self.arguments, self.summary = arguments, {}
        self.rows: dict[int, dict[str, float]] = {}
        earlier = [run for run in service.runs if run.arguments["id"] == arguments["id"]]
        self.step = 0 if self.offline else max((max(run.rows) + 1 for run in earlier), default=0)
        self._next, self.saved, self.preempting, self.exit_code = self.step, [], False, None

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step >= self._next, f"the service refuses step {step} behind {self._next}"
        self._next = step
        self.rows.setdefault(step, {}).update(data)

    def save(self, glob_str: str, base_path: str | None = None, policy: str = "live") -> None:
        self.saved.append(Path(glob_str).relative_to(base_path))

    def mark_preempting(self) -> None:
        self.preempting = True

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code


class WandbService:
    """The service and the module `wandb` that speaks to it; `answers` False: nobody is there."""

    def __init__(self) -> None:
        self.runs: list[WandbRun] = []
        self.answers, self.has_key, self.busy = True, True, False
        self.module = module(
            "wandb",
            Error=WandbError,
            run=None,
            Settings=self.settings,
            setup=self.setup,
            login=self.login,
            init=self.init,
            teardown=self.teardown,
        )

    @staticmethod
    def settings(
        *,
        console: str = "auto",
        silent: bool = False,
        reinit: str = "default",
        init_timeout: float = 90.0,
        finish_timeout: float = 0.0,
    ) -> SimpleNamespace:
        return SimpleNamespace(silent=silent, reinit=reinit, mode=os.environ.get("WANDB_MODE", "online"))

    def setup(self, settings: Any = None) -> SimpleNamespace:
        return SimpleNamespace(settings=settings)

    def login(self, *, prompt: bool = True, verify: bool = True) -> bool:
        assert not prompt and not verify, "a run must not wait for somebody at the keyboard"
        return self.has_key

    def init(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        id: str | None = None,
        name: str | None = None,
        dir: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str | None = None,
        settings: Any = None,
        mode: str | None = None,
    ) -> WandbRun:
        if self.busy:
            raise WandbError(f"run ID {id} is in use")
        if mode != "offline" and not self.answers:
            self.busy = True
            raise WandbError("nobody answers")
        assert resume == "allow" and settings.silent and settings.reinit == "create_new"
        arguments = {"project": project, "entity": entity, "id": id, "name": name, "config": config}
        self.runs.append(WandbRun(self, mode, dir, arguments))
        return self.runs[-1]

    def teardown(self) -> None:
        self.busy = False


class MlflowException(Exception):
    """Stands for `mlflow.exceptions.MlflowException`."""

    def __init__(self, message: str, error_code: str = "INTERNAL_ERROR"):
        super().__init__(message)
        self.error_code = error_code


class MlflowStore:
    """A store with the rules of MLflow, and the modules that speak to it."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}
        self.uris: list[str | None] = []
        self.metric, self.param = SimpleNamespace, SimpleNamespace
        store = self

        class MlflowClient(_Client):
            def __init__(self, tracking_uri: str | None = None):
                super().__init__(store, tracking_uri)

        entities = module(
            "mlflow.entities",
            Metric=lambda key, value, timestamp, step: SimpleNamespace(
                key=key, value=value, timestamp=timestamp, step=step
            ),
            Param=lambda key, value: SimpleNamespace(key=key, value=value),
        )
        exceptions = module("mlflow.exceptions", MlflowException=MlflowException)
        self.modules = {
            "mlflow": module("mlflow", MlflowClient=MlflowClient, entities=entities, exceptions=exceptions),
            "mlflow.entities": entities,
            "mlflow.exceptions": exceptions,
        }


class _Client:
    def __init__(self, store: MlflowStore, tracking_uri: str | None):
        self._store, self.tracking_uri = store, tracking_uri
        store.uris.append(tracking_uri)

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        known = self._store.experiments.get(name)
        return None if known is None else SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        assert name not in self._store.experiments
        return self._store.experiments.setdefault(name, str(len(self._store.experiments) + 1))

    def create_run(self, experiment_id: str, run_name: str | None = None) -> SimpleNamespace:
        run_id = f"{len(self._store.runs) + 1:032x}"
        info = SimpleNamespace(
            run_id=run_id, status="RUNNING", run_name=run_name, experiment_id=experiment_id
        )
        data = SimpleNamespace(params={}, tags={})
        self._store.runs[run_id] = SimpleNamespace(info=info, data=data, history={}, files={})
        return self._store.runs[run_id]

    def get_run(self, run_id: str) -> SimpleNamespace:
        if run_id not in self._store.runs:
            raise MlflowException(f"no run {run_id}", "RESOURCE_DOES_NOT_EXIST")
        return self._store.runs[run_id]

    def update_run(self, run_id: str, status: str | None = None) -> None:
        self.get_run(run_id).info.status = status

    def set_terminated(self, run_id: str, status: str | None = None) -> None:
        self.update_run(run_id, status)

    def set_tag(self, run_id: str, key: str, value: Any) -> None:
        self.get_run(run_id).data.tags[key] = value

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.get_run(run_id).files[artifact_file] = text

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        run = self.get_run(run_id)
        assert len(params) <= 100
        for entry in [*metrics, *params]:
            assert re.fullmatch(r"[\w\-./: ]{1,250}", entry.key), f"MLflow refuses the name {entry.key}"
        for param in params:
            assert run.data.params.setdefault(param.key, param.value) == param.value, "params must not change"
        for metric in metrics:
            run.history.setdefault(metric.key, []).append(metric)

    def get_metric_history(self, run_id: str, key: str) -> list[SimpleNamespace]:
        return self.get_run(run_id).history.get(key, [])
