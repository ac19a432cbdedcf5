"""Sets up the process group of a run and lets ranks agree.

A run started by `torchrun` has one process per device; any other run is a group of one process, which needs
no port and no file.
"""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from recsys import protos as pb
from recsys.errors import LostProcessError, RecsysError
from recsys.training.rendezvous import fresh_store

TIMEOUT = timedelta(seconds=90)
"""Timeout of a collective, and of the meeting of all processes at the start."""

_LATER = timedelta(seconds=30)
"""Collectives time out so much later than `train.rank_timeout`, so that the error can name the rank."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Processes:
    """This process's place among the processes of the run, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the logs."""
        return self.rank == 0


@contextmanager
def process_group(timeout: timedelta = TIMEOUT) -> Iterator[Processes]:
    """Sets up the process group of the run. No model, optimizer or pipeline may outlive the block.

    Args:
        timeout: how long a process waits in a collective for the others. It must exceed any pause between two
            collectives of the run.

    If the caller already has a process group, the run uses that group and does not destroy it.

    An object that survives the block holds communicators, and a process that exits with live communicators
    sometimes aborts. That is why garbage is collected and ranks meet at a barrier before the group is
    destroyed. After an error there is no barrier, since the other ranks may be gone.

    Raises:
        LostProcessError: a collective failed because another rank is gone, or did not come in time.
    """
    if dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size(), _device())
        return
    show_error = sys.excepthook
    processes = _start(timeout)
    try:
        try:
            yield processes
        finally:
            gc.collect()
        dist.barrier()
    except RuntimeError as error:
        if _is_broken_collective(error):
            raise LostProcessError(
                f"rank {processes.rank} waited for a rank that is gone or did not come "
                f"({str(error).split('. ')[0]}). The output of the rank that ended first has the cause"
            ) from error
        raise
    finally:
        dist.destroy_process_group()
        # torch.distributed installs a hook that prefixes traceback lines with the rank, and never removes it.
        sys.excepthook = show_error


def collective_timeout(train: pb.Train) -> timedelta:
    """Returns the timeout of collectives of a training run."""
    return timedelta(seconds=train.rank_timeout) + _LATER


def _is_broken_collective(error: RuntimeError) -> bool:
    """Returns whether NCCL, a store, or gloo raised the error; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _start(timeout: timedelta) -> Processes:
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world_size = dist.HashStore(), 0, 1
    if dist.is_torchelastic_launched():
        shared, rank, world_size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        store = fresh_store(shared, rank, world_size, TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def _device() -> torch.device:
    """Returns this process's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))


def gather(value: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Returns the `value` of every rank, in rank order, on every rank. Collective.

    Args:
        value: anything that pickles.
        group: a group of all ranks, for a thread that must not use the default group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def agree(function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Calls `function` on every rank and returns the results in rank order, on every rank. Collective.

    Raises:
        RecsysError: on every rank, if a rank raised an OSError or a RecsysError.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = function()
    except (RecsysError, OSError) as raised:
        error = raised
    answers = gather((result, error), group)
    for _, raised in answers:
        if raised is not None:
            raise raised if isinstance(raised, RecsysError) else RecsysError(str(raised)) from raised
    return [result for result, _ in answers]


def on_main(function: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Calls `function` on rank 0 only and returns its result on every rank. Collective.

    Args:
        function: what rank 0 calls.
        group: as in `gather`.

    Raises:
        RecsysError: on every rank, if rank 0 raised a RecsysError or an OSError.
    """
    answer: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer[0] = function()
        except (RecsysError, OSError) as error:
            answer[1] = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[1], OSError):
        raise RecsysError(str(answer[1])) from answer[1]
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
