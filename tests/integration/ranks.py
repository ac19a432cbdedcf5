"""Runs several trainings in one process group, one after the other, for `test_distributed.py`.

    torchrun --nproc-per-node 2 tests/integration/ranks.py JOBS.json

A job is `{"folder", "overrides"}`, with `"nan": [rank, step]` to spoil a loss or `"save_to"` to only load and
save. What a rank sees goes to `<folder>/rank-<rank>.json`.
"""

import json
import sys
from pathlib import Path

import torch

from recsys import config
from recsys.errors import RecsysError
from recsys.models.base import Losses
from recsys.training.checkpoint import Checkpoints
from recsys.training.distributed import Processes, process_group
from recsys.training.hooks.metrics_file import MetricsFile
from recsys.training.run import describe
from recsys.training.session import Session, open_session
from recsys.training.trainer import Trainer
from tests.integration.runs import CONFIG


def spoil(session: Session, step: int) -> None:
    """Makes the loss of a step NaN on this rank."""
    calls = [0]

    def hook(_module: torch.nn.Module, _inputs: object, losses: Losses) -> Losses | None:
        calls[0] += 1
        if calls[0] != step:
            return None
        return Losses(losses.names, losses.sums * float("nan"), losses.counts, losses.weights)

    session.model.objective.register_forward_hook(hook)


def run(job: dict, processes: Processes) -> dict:
    """Trains once and returns this rank's observations."""
    folder = Path(job["folder"])
    pipeline = config.prepare(CONFIG, job["overrides"]).pipeline
    session = open_session(pipeline, folder, processes)
    if "save_to" in job:
        session.checkpoints = Checkpoints(Path(job["save_to"]))
        session.save()
        return {"step": session.progress.step}
    if "nan" in job and job["nan"][0] == processes.rank:
        spoil(session, job["nan"][1])
    hooks = [MetricsFile()] if processes.is_main else []
    for hook in hooks:
        hook.started(describe(session))
    try:
        return {"step": Trainer(session, hooks).run().step}
    except RecsysError as error:
        return {"error": type(error).__name__, "message": str(error)}
    finally:
        for hook in hooks:
            hook.close()


def main() -> None:
    """Runs all jobs of a file."""
    torch.set_num_threads(1)
    with process_group() as processes:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            folder = Path(job["folder"])
            folder.mkdir(parents=True, exist_ok=True)
            seen = run(job, processes)
            (folder / f"rank-{processes.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
