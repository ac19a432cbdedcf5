"""Adds up the memory that tables, other weights and optimizers need on each rank, before it is allocated.

Activations, batches and buffers of exchanges are not in the sums, since they depend on the data.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torchrec.distributed.comm import get_local_size

from recsys import protos as pb
from recsys.config import features
from recsys.errors import ConfigError
from recsys.training.distributed import Processes, gather
from recsys.training.optimizers import chosen_dense, chosen_sparse
from recsys.training.sharding_plan import Plan, TablePlan, ids_per_row, sharded_collections

_GIBI = 2**30
_CACHE_BYTES_PER_ROW = 4
"""Device memory that FBGEMM's cache needs for each row of a table, besides the cached rows."""


@dataclass(frozen=True)
class TableMemory:
    """Bytes of a table on one rank.

    Attributes:
        weights, states: of the table's rows and of their optimizer states.
        device, host: the same memory and the cache, by the place where it is.
    """

    weights: int
    states: int
    device: int
    host: int


def table_memory(table: TablePlan, rank: int, train: pb.Train) -> TableMemory:
    """Returns the memory of a rank's part of a table."""
    rows, columns = table.rows_on(rank), table.columns_on(rank)
    copies = 2 if train.HasField("weight_averaging") else 1
    weights = copies * rows * columns * (2 if table.precision == "FP16" else 4)
    chosen = chosen_sparse(train.sparse_optimizer)
    states = 4 * rows * chosen.numbers_per_row(columns) if chosen is not None and columns else 0
    total = weights + states
    if table.kernel == "FUSED":
        return TableMemory(weights, states, device=total, host=0)
    cache = 0
    if table.cache_load_factor is not None:
        cache = int(weights // copies * table.cache_load_factor) + _CACHE_BYTES_PER_ROW * rows
    return TableMemory(weights, states, device=cache, host=total)


def dense_memory(module: nn.Module, pipeline: pb.Pipeline) -> int:
    """Returns the bytes of all weights that are not in sharded tables, their gradients and optimizer."""
    sharded = {
        parameter
        for tables in sharded_collections(module, pipeline).values()
        for parameter in tables.parameters()
    }
    train = pipeline.train
    copies = 2 + chosen_dense(train.dense_optimizer).state_copies + train.HasField("weight_averaging")
    weights = sum(p.numel() * p.element_size() for p in module.parameters() if p not in sharded)
    return copies * weights


def free_memory(device: torch.device, world_size: int) -> int:
    """Returns the free bytes of a process's device; the processes of a host share its memory equally."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _free_host_memory() // (get_local_size(world_size) if world_size > 1 else 1)


def require_room(module: nn.Module, plan: Plan, pipeline: pb.Pipeline, processes: Processes) -> None:
    """Checks that each rank has room for its part of the tables and for everything else. Collective.

    Raises:
        ConfigError: on all ranks, if a rank has too little memory; it names the largest tables.
    """
    messages = gather(_shortage(module, plan, pipeline, processes))
    if message := next(filter(None, messages), ""):
        raise ConfigError(message)


def describe(plan: Plan, pipeline: pb.Pipeline) -> list[str]:
    """Describes a plan as the lines of a table.

    Bytes are those of the rank that holds most of the table, optimizer states included. Ids are the most that
    a rank looks up for all ranks in a step: those of histories of full length.
    """
    ids, batch = ids_per_row(pipeline), pipeline.data.batch_size
    columns = {table.name: table.columns for table in features.tables(pipeline)}
    lines = [("table", "rows", "width", "type", "division", "kernel", "GiB a rank", "ids a step a rank")]
    for table in plan.tables:
        memory = [table_memory(table, rank, pipeline.train) for rank in range(plan.world_size)]
        looked_up = sum(ids.get(name, 1.0) for name in columns.get(table.table, ())) * batch
        everywhere = table.sharding == "ROW_WISE"
        cache = "" if table.cache_load_factor is None else f" {table.cache_load_factor:g}"
        ranks = "all ranks" if everywhere else "rank " + ", ".join(map(str, table.ranks))
        lines.append(
            (
                table.table,
                f"{table.rows:,}",
                str(table.width),
                table.precision,
                f"{table.sharding} {ranks}",
                table.kernel + cache,
                f"{max(m.device + m.host for m in memory) / _GIBI:,.3f}",
                f"<= {looked_up * (1 if everywhere else plan.world_size):,.0f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _shortage(module: nn.Module, plan: Plan, pipeline: pb.Pipeline, processes: Processes) -> str:
    """Returns the error about this rank's memory, or an empty text."""
    parts = [(table, table_memory(table, processes.rank, pipeline.train)) for table in plan.tables]
    dense = dense_memory(module, pipeline)
    device = dense + sum(memory.device for _, memory in parts)
    host = sum(memory.host for _, memory in parts)
    cpu = torch.device("cpu")
    needs = [(str(processes.device), device, free_memory(processes.device, processes.world_size))]
    if host:
        needs.append(("the host", host, free_memory(cpu, processes.world_size)))
    for place, needed, free in needs:
        if needed > free:
            largest = sorted(parts, key=lambda part: part[1].weights, reverse=True)[:3]
            return (
                f"rank {processes.rank} needs {_gib(needed)} of memory on {place} and has {_gib(free)}, "
                f"activations not counted: {_listed(largest)}; other weights with gradients and "
                f"optimizer {_gib(dense)}. {_remedy(processes)}"
            )
    return ""


def _listed(parts: Iterable[tuple[TablePlan, TableMemory]]) -> str:
    return ", ".join(
        f"table {table.table} {_gib(memory.weights)} ({table.sharding}, {table.kernel}) and "
        f"{_gib(memory.states)} of optimizer states"
        for table, memory in parts
    )


def _remedy(processes: Processes) -> str:
    uvm = " keep tables in the host's memory with train.sharding.kernel: FUSED_UVM_CACHING,"
    return (
        f"Start more processes on more {'GPUs' if processes.device.type == 'cuda' else 'machines'},"
        f"{uvm if processes.device.type == 'cuda' else ''} store them as "
        "model.embedding.table_precision: FP16, or give them fewer rows or columns"
    )


def _gib(size: int) -> str:
    return f"{size / _GIBI:,.3f} GiB"


def _free_host_memory() -> int:
    """Returns the bytes that processes of this host, or of this container, can still allocate."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        entries = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in entries:
            free = int(entries["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free
