"""Divides the tables of a model over the ranks of a run, and averages the gradients of everything else.

Model code is not aware of ranks: `shard` wraps a finished model, whose weights every rank has built from the
same seed. Large tables are not built before: each rank allocates its part of them and draws the initial
values of these rows only.
"""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

from recsys import protos as pb
from recsys.modules.table_values import BlockNormal
from recsys.training.distributed import Processes, on_main
from recsys.training.local_lookup import look_up_locally
from recsys.training.memory import dense_memory, describe, free_memory, require_room
from recsys.training.optimizers import fused_params
from recsys.training.sharding_plan import Plan, make_plan, read_plan, sharded_collections

log = logging.getLogger(__name__)


def plan_tables(
    module: nn.Module, pipeline: pb.Pipeline, processes: Processes, folder: Path | None = None
) -> Plan:
    """Plans the division of the tables, logs it, and checks that every rank has room for it. Collective.

    Args:
        module: the model, which may have tables on the meta device.
        pipeline: the resolved config.
        processes: this rank.
        folder: the run folder, in which the plan is stored; None stores nothing.

    Raises:
        ConfigError: the file of `train.sharding_plan` does not fit, or a rank has too little memory.
    """
    world_size, train = processes.world_size, pipeline.train

    def decide() -> Plan:
        if train.sharding_plan:
            return read_plan(train.sharding_plan, module, pipeline, world_size)
        room = free_memory(processes.device, world_size) - dense_memory(module, pipeline)
        return make_plan(module, pipeline, world_size, processes.device.type, max(room, 0))

    plan = on_main(decide)
    if plan.tables and processes.is_main:
        log.info("sharded tables:\n%s", "\n".join(describe(plan, pipeline)))
    require_room(module, plan, pipeline, processes)
    if folder is not None and plan.tables:
        on_main(lambda: plan.write(folder))
    return plan


def shard(
    module: nn.Module, pipeline: pb.Pipeline, processes: Processes, plan: Plan, *, draw: bool = True
) -> DistributedModelParallel:
    """Wraps a model for the processes of the run; its weights keep their values. Collective.

    With pb.Embedding.SHARDED, tables are split over the ranks and trained inside the backward pass, even in a
    run of one process, which looks them up without exchange. With pb.Embedding.REPLICATED they stay plain
    parameters, whose gradients are averaged like all others.

    Args:
        module: a model with tables in `EmbeddingCollection`s, on the CPU, the same on every rank. Tables on
            the meta device are allocated here, each rank's part of them.
        pipeline: the resolved config.
        processes: this rank.
        plan: the division of the tables, from `plan_tables`.
        draw: give tables that were on the meta device their initial values; False leaves them undefined, for
            weights that are loaded next.
    """
    collections = sharded_collections(module, pipeline)
    sharder = EmbeddingCollectionSharder(
        fused_params=fused_params(pipeline.train.sparse_optimizer), use_index_dedup=pipeline.train.unique_ids
    )
    planned = {
        name: EmbeddingModuleShardingPlan(
            {
                config.name: plan.of(config).torchrec(
                    tables.embeddings[config.name].weight,
                    processes.world_size,
                    processes.device.type,
                    sharder,
                )
                for config in tables.embedding_configs()
            }
        )
        for name, tables in collections.items()
    }
    wrapped = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=processes.device,
        plan=ShardingPlan(planned),
        sharders=[sharder] if planned else [],
        data_parallel_wrapper=_AverageGradients(),
    )
    # TorchRec copies weights into its shards only for collections that were not built on the meta device.
    built_on_meta = {n: tables for n, tables in collections.items() if tables.device == torch.device("meta")}
    if built_on_meta and draw:
        _fill(wrapped, built_on_meta)
    if processes.world_size == 1 and planned:
        look_up_locally(module)
        if pipeline.train.unique_ids:
            log.warning("train.unique_ids has no effect in a run of one process, which sends ids to nobody")
    return wrapped


@torch.no_grad()
def _fill(wrapped: DistributedModelParallel, collections: dict[str, EmbeddingCollection]) -> None:
    """Fills this rank's parts of tables from their collections, or draws them if these have no memory."""
    weights = wrapped.state_dict()
    for path, tables in collections.items():
        for config in tables.embedding_configs():
            whole = tables.embeddings[config.name].weight
            for shard_ in weights[f"{path}.embeddings.{config.name}.weight"].local_shards():
                row, column = shard_.metadata.shard_offsets
                part = shard_.tensor
                if not whole.is_meta:
                    part.copy_(whole[row : row + part.shape[0], column : column + part.shape[1]])
                elif isinstance(config.init_fn, BlockNormal):
                    config.init_fn.fill(part, row, column)


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
