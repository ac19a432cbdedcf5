"""Sets up the process group of a run, lets ranks agree, and shards tables over ranks.

A run started by `torchrun` has one process a device; any other run is a group of one, with no port and no
file. Model code knows nothing of it: `shard` wraps a finished model, whose weights every rank has built from
the same seed.
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
"""Timeout of a collective; longer than any pause between two collectives of a run."""

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
        """True on rank 0, which writes the logs."""
        return self.rank == 0


@contextmanager
def process_group() -> Iterator[Processes]:
    """The process group of the run; the block must leave no model, optimizer or pipeline behind.

    If the caller already has a process group, the run uses it and leaves it alone.

    What survives the block still holds communicators, and a process that exits with those aborts at random:
    hence the collection and the barrier before the group goes. After an error there is no barrier: the other
    ranks may be gone.
    """
    if dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size(), _device())
        return
    show_error = sys.excepthook
    processes = _start()
    try:
        yield processes
        gc.collect()
        dist.barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()
        # torch.distributed puts the rank in front of each line of a traceback, and leaves it so.
        sys.excepthook = show_error


def _start() -> Processes:
    device = _device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world_size = dist.HashStore(), 0, 1
    if dist.is_torchelastic_launched():
        shared, rank, world_size = next(dist.rendezvous("env://", timeout=_TIMEOUT))
        store = fresh_store(shared, rank, world_size, _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def _device() -> torch.device:
    """This process's GPU, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))


def gather(value: Result) -> list[Result]:
    """`value` of every rank, in the order of ranks, on every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[[], Result]) -> Result:
    """The result of `function`, called on rank 0 only, on every rank. Collective.

    Raises:
        RecsysError: on every rank, when rank 0 raised it or an OSError.
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

    With pb.Embedding.SHARDED, tables are cut over the ranks and trained inside the backward pass, with one
    process too; with pb.Embedding.REPLICATED they stay plain parameters, whose gradients are averaged as all
    others.

    Args:
        module: a model with tables in `EmbeddingCollection`s, on the CPU, the same on every rank.
        pipeline: its resolved config.
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
    """Averages the gradients of everything that is not sharded, over ranks."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        inner = dmp._dmp_wrapped_module.to(device)
        sharded = set(DistributedModelParallel._sharded_parameter_names(inner))
        if env.world_size == 1 or not {name for name, _ in inner.named_parameters()} - sharded:
            dmp._dmp_wrapped_module = inner
            return
        # Buffers are constants, the same on all ranks: nothing to send.
        constants = {name for name, _ in inner.named_buffers()}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, sharded | constants)
        # Unused parameters are looked for although there should be none: only then are the buckets of
        # gradients never rebuilt after the first step, so a resumed run adds up numbers in the same order as
        # an uninterrupted one.
        dmp._dmp_wrapped_module = DistributedDataParallel(
            inner,
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )
