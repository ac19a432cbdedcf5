"""Sets up the process group of a run, lets ranks agree, and shards tables over ranks.

A run started by `torchrun` has one process per device; any other run is a group of one process, which needs
no port and no file. Model code is not aware of ranks: `shard` wraps a finished model, whose weights every
rank has built from the same seed.
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
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recsys import protos as pb
from recsys.errors import RecsysError
from recsys.training.optimizers import fused_params
from recsys.training.rendezvous import fresh_store

_TIMEOUT = timedelta(seconds=90)
"""Timeout of a collective of a training run, and of the meeting of all processes at its start."""

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
def process_group(timeout: timedelta = _TIMEOUT) -> Iterator[Processes]:
    """Sets up the process group of the run. No model, optimizer or pipeline may outlive the block.

    Args:
        timeout: how long a process waits in a collective for the others. It must exceed any pause between two
            collectives of the run.

    If the caller already has a process group, the run uses that group and does not destroy it.

    An object that survives the block holds communicators, and a process that exits with live communicators
    sometimes aborts. That is why garbage is collected and ranks meet at a barrier before the group is
    destroyed. After an error there is no barrier, since the other ranks may be gone.
    """
    if dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size(), _device())
        return
    show_error = sys.excepthook
    processes = _start(timeout)
    try:
        yield processes
        gc.collect()
        dist.barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()
        # torch.distributed installs a hook that prefixes traceback lines with the rank, and never removes it.
        sys.excepthook = show_error


def _start(timeout: timedelta) -> Processes:
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world_size = dist.HashStore(), 0, 1
    if dist.is_torchelastic_launched():
        shared, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        store = fresh_store(shared, rank, world_size, _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def _device() -> torch.device:
    """Returns this process's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))


def gather(value: Result) -> list[Result]:
    """Returns the `value` of every rank, in rank order, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[[], Result]) -> Result:
    """Calls `function` on rank 0 only and returns its result on every rank. Collective.

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
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[1], OSError):
        raise RecsysError(str(answer[1])) from answer[1]
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def shard(module: nn.Module, pipeline: pb.Pipeline, processes: Processes) -> DistributedModelParallel:
    """Wraps a model for the processes of the run; its weights keep their values. Collective.

    With pb.Embedding.SHARDED, tables are split over the ranks and trained inside the backward pass, even in a
    run of one process. With pb.Embedding.REPLICATED they stay plain parameters, whose gradients are averaged
    like all others.

    Args:
        module: a model with tables in `EmbeddingCollection`s, on the CPU, the same on every rank.
        pipeline: the resolved config.
        processes: this rank.
    """
    placement, train = pipeline.model.embedding.placement, pipeline.train
    sharders, plan = [], {}
    if placement == pb.Embedding.SHARDED:
        sharder = EmbeddingCollectionSharder(fused_params=fused_params(train.sparse_optimizer))
        sharders.append(sharder)
        for name, tables in module.named_modules():
            if isinstance(tables, EmbeddingCollection):
                plan[name] = construct_module_sharding_plan(
                    tables,
                    _table_plans(tables, train.sharding.kind, processes.world_size),
                    sharder=sharder,
                    world_size=processes.world_size,
                    local_size=get_local_size(processes.world_size) if processes.world_size > 1 else 1,
                    device_type=processes.device.type,
                )
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=processes.device,
        plan=ShardingPlan(plan),
        sharders=sharders,
        data_parallel_wrapper=_AverageGradients(),
    )


def _table_plans(tables: EmbeddingCollection, kind: int, world_size: int) -> dict[str, Any]:
    names = [config.name for config in tables.embedding_configs()]
    if kind == pb.Sharding.TABLE_WISE:
        return {name: table_wise(i % world_size, compute_kernel="fused") for i, name in enumerate(names)}
    return {name: row_wise(compute_kernel="fused") for name in names}


class _AverageGradients(DataParallelWrapper):
    """Averages the gradients of all parameters that are not sharded over the ranks."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        inner = dmp._dmp_wrapped_module.to(device)
        sharded = set(DistributedModelParallel._sharded_parameter_names(inner))
        if env.world_size == 1 or not {name for name, _ in inner.named_parameters()} - sharded:
            dmp._dmp_wrapped_module = inner
            return
        # Buffers are constants and equal on all ranks, so they need not be sent.
        constants = {name for name, _ in inner.named_buffers()}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, sharded | constants)
        # There should be no unused parameters. With this option, however, DDP does not rebuild its gradient
        # buckets after the first step, so a resumed run sums in the same order as an uninterrupted run.
        dmp._dmp_wrapped_module = DistributedDataParallel(
            inner,
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
