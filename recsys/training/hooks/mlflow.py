"""Sends a run to MLflow: to a tracking server or a local store."""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys import config as config_language
from recsys import protos as pb
from recsys.config.registry import register
from recsys.training.hooks.base import Outcome, Run
from recsys.training.hooks.tracker import Tracker

MOST_PARAMS = 100
"""MLflow accepts at most this many parameters per request."""

LONGEST_VALUE = 500
"""Every version of MLflow accepts parameter values of this many characters."""

log = logging.getLogger(__name__)


@register(pb.MlflowHook)
class MlflowHook(Tracker):
    """Sends a run to MLflow under the name of its run folder."""

    service = "MLflow"
    id_file = "mlflow.id"

    def __init__(self, config: pb.MlflowHook):
        super().__init__()
        self._config = config
        self._client: Any = None
        self._run_id = ""

    def connect(self, folder: Path, run: Run | None) -> None:
        """Creates the run, or continues the one whose id the run folder holds."""
        from mlflow import MlflowClient

        logging.getLogger("urllib3.connectionpool").addFilter(_is_of_another_thread)
        self._client = MlflowClient(tracking_uri=self._config.tracking_uri or None)
        run_id = self.read_id(folder)
        if run is None:
            self._run_id = run_id or ""
            return
        continued = run_id is not None and self._continue(run_id)
        self._run_id = run_id if continued else self._create(folder)
        self._log_params(run, continued)
        self._client.log_text(self._run_id, run.config_text, config_language.FILE_NAME)
        log.info("%s: run %s at %s", self.service, self._run_id, self._client.tracking_uri)

    def _continue(self, run_id: str) -> bool:
        """Marks a run as running again; returns False if the server has no such run."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            log.warning("%s no longer has run %s, so this run gets a new id", self.service, run_id)
            return False
        return True

    def _create(self, folder: Path) -> str:
        """Creates a run in the experiment and returns its id."""
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        if experiment is None:
            experiment_id = self._client.create_experiment(self._config.experiment)
        else:
            experiment_id = experiment.experiment_id
        run_id = self._client.create_run(experiment_id, run_name=folder.resolve().name).info.run_id
        self.write_id(folder, run_id)
        return run_id

    def _log_params(self, run: Run, continued: bool) -> None:
        """Sends hyperparameters. MLflow does not allow changes, so a continued run keeps its first values."""
        from mlflow.entities import Param

        present = self._client.get_run(self._run_id).data.params if continued else {}
        params = [
            Param(name, str(value)[:LONGEST_VALUE])
            for name, value in _named(run.hyperparameters).items()
            if name not in present
        ]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + MOST_PARAMS])

    def log(self, scalars: Mapping[str, float], step: int, seconds: float) -> None:
        """Adds a point to the curve of each number."""
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(seconds * 1000), step) for name, value in _named(scalars).items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_tested(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds test metrics as points at the step of the evaluated state."""
        self.log(scalars, step, time.time())

    def disconnect(self, outcome: Outcome | None, *, training: bool) -> None:
        """Sends the best metric and ends the run: FINISHED, KILLED after a signal, FAILED after an error."""
        if not training:
            return
        if outcome is not None:
            self._client.set_tag(self._run_id, "outcome", outcome.reason)
            if outcome.best is not None:
                best = outcome.best
                self.log({f"best/{best.metric}": best.value}, best.step, time.time())
        ended = "FAILED" if outcome is None else "KILLED" if outcome.signal else "FINISHED"
        self._client.set_terminated(self._run_id, ended)


def _is_of_another_thread(record: logging.LogRecord) -> bool:
    """Filters out log records of the thread that makes our requests, which would log every retry."""
    return record.threadName != MlflowHook.service


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Renames values as MLflow requires: `ndcg@10` becomes `ndcg_at_10`, other special characters `_`."""
    return {re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_")): value for name, value in values.items()}
