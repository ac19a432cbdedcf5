"""Runs several trainings in one process group, one after the other, for `test_distributed.py`.

A job is `{"folder", "overrides"}`, with `"nan": [rank, step]` to spoil a loss, `"save_to"` to only load and
save, `"full": name` to fill the disk for that state, or `"drawn_whole"` for another
`table_values.DRAWN_WHOLE`. What a rank sees goes to `<folder>/rank-<rank>.json`.
"""

import gc
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from recsys import config
from recsys.errors import RecsysError
from recsys.models.base import Losses
from recsys.modules import table_values
from recsys.training.checkpoint import Checkpoints
from recsys.training.distributed import Processes, process_group
from recsys.training.hooks.metrics_file import MetricsFile
from recsys.training.run import describe
from recsys.training.session import Session, open_session
from recsys.training.trainer import Trainer
from tests.integration.runs import CONFIG

DISK_USAGE = shutil.disk_usage


def spoil(session: Session, step: int) -> None:
    """Makes the loss of a step NaN on this rank."""
    calls = [0]

    def hook(_module: torch.nn.Module, _inputs: object, losses: Losses) -> Losses | None:
        calls[0] += 1
        if calls[0] != step:
            return None
        return Losses(losses.names, losses.sums * float("nan"), losses.counts, losses.weights)

    session.model.objective.register_forward_hook(hook)


def fill_disk(name: str) -> None:
    """Lets the disk be full when a state is to be written."""
    full = shutil._ntuple_diskusage(10**9, 10**9, 0)
    shutil.disk_usage = lambda path: full if name in str(path) else DISK_USAGE(path)


def run(job: dict, processes: Processes) -> dict:
    """Trains once and returns this rank's observations."""
    folder = Path(job["folder"])
    table_values.DRAWN_WHOLE = job.get("drawn_whole", 2**26)
    pipeline = config.prepare(CONFIG, job["overrides"]).pipeline
    session = open_session(pipeline, folder, processes)
    if "save_to" in job:
        session.checkpoints = Checkpoints(Path(job["save_to"]))
        session.save()
        return {"step": session.progress.step}
    if "full" in job:
        fill_disk(job["full"])
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
        shutil.disk_usage = DISK_USAGE
        for hook in hooks:
            hook.close()


def main(rank: int, jobs: str, store: str) -> None:
    """Runs all jobs of a file on one of two ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    with process_group() as processes:
        for job in json.loads(Path(jobs).read_text()):
            folder = Path(job["folder"])
            folder.mkdir(parents=True, exist_ok=True)
            seen = run(job, processes)
            (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
