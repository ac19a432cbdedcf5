"""A run from config to last line: opens the session, puts the hooks around it, trains."""

import logging
from pathlib import Path

import torch

from recsys import config
from recsys import protos as pb
from recsys.training.distributed import Processes
from recsys.training.hooks import Hook, Outcome, Run
from recsys.training.hooks.console import Console, next_lines
from recsys.training.hooks.metrics_file import MetricsFile
from recsys.training.session import Session, open_session
from recsys.training.trainer import Trainer

log = logging.getLogger(__name__)


def train(pipeline: pb.Pipeline, folder: Path, processes: Processes) -> Outcome:
    """Trains the model of a resolved config in a run folder, from the last saved state if there is one."""
    session = open_session(pipeline, folder, processes)
    run = _describe(session)
    if reason := session.finish_reason():
        return _finished_before(session, run, reason)
    hooks = _hooks() if processes.is_main else []
    try:
        for hook in hooks:
            hook.started(run)
        return Trainer(session, hooks).run()
    finally:
        for hook in hooks:
            hook.close()


def _hooks() -> list[Hook]:
    from recsys.training.hooks.tensorboard import TensorBoard

    return [MetricsFile(), TensorBoard(), Console()]


def _describe(session: Session) -> Run:
    processes = session.processes
    return Run(
        folder=session.folder,
        config_text=config.to_text(session.pipeline),
        first_step=session.progress.step,
        total_steps=session.total_steps,
        facts={
            "device": f"{processes.device}, {processes.world_size} process(es), "
            f"{torch.get_num_threads()} thread(s) each",
            "parameters": f"{session.parameters:,}",
        },
    )


def _finished_before(session: Session, run: Run, reason: str) -> Outcome:
    newest = session.checkpoints.steps()[-1]
    outcome = Outcome(session.progress.step, reason, newest, session.progress.best)
    log.info("nothing to do: %s", reason)
    for line in next_lines(outcome, run):
        log.info("%s", line)
    return outcome


def dry_run(pipeline: pb.Pipeline, processes: Processes) -> None:
    raise NotImplementedError
