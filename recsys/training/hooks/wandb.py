"""Sends a run to Weights & Biases.

The client first writes everything below `wandb/` in the run folder, from where a separate process uploads it.
Without a key or a network the data stays there, for `wandb sync`.
"""

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recsys import config as config_language
from recsys import protos as pb
from recsys.config.registry import register
from recsys.training.hooks.base import Outcome, Run
from recsys.training.hooks.tracker import Tracker

SECONDS_TO_CONNECT = 12
SECONDS_TO_UPLOAD = 15
"""Both timeouts together are less than `tracker.LONGEST_WAIT`, so even a short run is recorded completely."""

log = logging.getLogger(__name__)


@register(pb.WandbHook)
class WandbHook(Tracker):
    """Sends a run to Weights & Biases under the name of its run folder."""

    service = "Weights & Biases"
    id_file = "wandb.id"

    def __init__(self, config: pb.WandbHook):
        super().__init__()
        self._config = config
        self._run: Any = None
        self._first_step = 0

    def connect(self, folder: Path, run: Run | None) -> None:
        """Starts the client. It records offline if there is no key or the service does not answer."""
        import wandb

        run_id = self.read_id(folder)
        if run_id is None:
            run_id = uuid.uuid4().hex[:12]
            self.write_id(folder, run_id)
        # The client prints nothing, and a run that is already open in the same process (a notebook) is not
        # disturbed.
        settings = wandb.Settings(
            console="off",
            silent=True,
            reinit="create_new",
            init_timeout=SECONDS_TO_CONNECT,
            finish_timeout=SECONDS_TO_UPLOAD,
        )
        arguments = {
            "project": self._config.project,
            "entity": self._config.entity or None,
            "id": run_id,
            "name": folder.resolve().name,
            "dir": str(folder),
            "config": None if run is None else run.hyperparameters,
            "resume": "allow",
            "settings": settings,
        }
        mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
        if mode == "online" and wandb.run is None and not wandb.login(prompt=False, verify=False):
            log.warning(
                "%s: no key (wandb login, or WANDB_API_KEY), so the run is recorded offline", self.service
            )
            mode = "offline"
        try:
            self._run = wandb.init(mode=mode, **arguments)
        except wandb.Error as error:
            log.warning("%s: %s. The run is recorded offline", self.service, error)
            wandb.teardown()  # or its process reports that the id is in use
            self._run = wandb.init(mode="offline", **arguments)
        # The service refuses steps that it already has, and a continued run repeats the steps after its last
        # saved state.
        self._first_step = self._run.step
        if run is not None:
            resolved = Path(self._run.dir) / config_language.FILE_NAME
            resolved.write_text(run.config_text, encoding="utf-8")
            self._run.save(str(resolved), base_path=self._run.dir, policy="now")
            log.info("%s: %s", self.service, self._run.dir if self._run.offline else self._run.url)

    def log(self, scalars: Mapping[str, float], step: int, seconds: float) -> None:
        """Adds values to the row of a step, unless the service has that step already."""
        if step >= self._first_step:
            self._run.log(dict(scalars), step=step)

    def log_tested(self, scalars: Mapping[str, float], step: int) -> None:
        """Puts test metrics into the run's summary."""
        self._run.summary.update({**scalars, "test/step": step})

    def disconnect(self, outcome: Outcome | None, *, training: bool) -> None:
        """Marks the run as finished, preempted or failed, and waits for the upload."""
        code = 0
        if training and outcome is None:
            code = 1
        if outcome is not None:
            self._run.summary["outcome"] = outcome.reason
            if outcome.best is not None:
                best = outcome.best
                self._run.summary.update({f"best/{best.metric}": best.value, "best/step": best.step})
            if outcome.signal:
                code = 128 + outcome.signal
                self._run.mark_preempting()
        self._run.finish(exit_code=code)
        if self._run.offline:
            log.info(
                "%s: upload what was recorded by   wandb sync %s", self.service, Path(self._run.dir).parent
            )
