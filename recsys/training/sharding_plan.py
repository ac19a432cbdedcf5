"""Decides how each sharded table is divided over the ranks; shows, stores and reads such plans.

TorchRec's planner places the tables, within the constraints that `train.sharding` sets for each of them. Its
decision becomes a `Plan`, a small value that is the same on all ranks, is printed when a run starts, and can
be read from a file instead (`train.sharding_plan`). `distributed.shard` carries it out.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torchrec import EmbeddingCollection
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.types import DataType

from recsys import files, typed_json
from recsys import protos as pb
from recsys.config import features
from recsys.config.checks.train import ROW_STATES
from recsys.errors import ConfigError
from recsys.modules.embedding import SUFFIX
from recsys.training.optimizers import fused_params

FILE_NAME = "sharding_plan.json"

_UNLIMITED = 2**60
"""Bytes of memory for a planner that must not refuse what the config demands."""

_PLANNED_CACHE = 0.2
"""Cache of tables for which the planner chooses the kernel, as a share of their rows."""


@dataclass(frozen=True)
class TablePlan:
    """The division of one table.

    Attributes:
        table: name in the config.
        rows, width: shape of the whole table.
        precision: "FP32" or "FP16".
        sharding: "ROW_WISE" in equal blocks of rows over all ranks, "TABLE_WISE" or "COLUMN_WISE".
        kernel: "FUSED", "FUSED_UVM" or "FUSED_UVM_CACHING".
        cache_load_factor: share of the rows in the cache; None without a cache.
        ranks: the rank of each shard.
    """

    table: str
    rows: int
    width: int
    precision: str
    sharding: str
    kernel: str
    cache_load_factor: float | None
    ranks: list[int]

    def rows_on(self, rank: int) -> int:
        """Returns the number of rows of which a rank holds all or some columns."""
        if self.sharding != "ROW_WISE":
            return self.rows if rank in self.ranks else 0
        block = -(-self.rows // len(self.ranks))
        return max(0, min(block, self.rows - rank * block))

    def columns_on(self, rank: int) -> int:
        """Returns the number of columns of the rows that a rank holds."""
        if self.sharding != "COLUMN_WISE":
            return self.width
        return self.width // len(self.ranks) * self.ranks.count(rank)

    def torchrec(
        self, param: nn.Parameter, world_size: int, device_type: str, sharder: Any
    ) -> ParameterSharding:
        """Returns the plan of this table in TorchRec's form."""
        kernel = self.kernel.lower()
        generators = {
            "ROW_WISE": lambda: row_wise(compute_kernel=kernel),
            "TABLE_WISE": lambda: table_wise(self.ranks[0], compute_kernel=kernel),
            "COLUMN_WISE": lambda: column_wise(self.ranks, compute_kernel=kernel),
        }
        local_size = get_local_size(world_size) if world_size > 1 else 1
        planned = generators[self.sharding]()(param, local_size, world_size, device_type, sharder)
        if self.cache_load_factor is not None:
            planned.cache_params = CacheParams(load_factor=self.cache_load_factor)
        planned.stochastic_rounding = self.precision == "FP16"
        return planned


@dataclass(frozen=True)
class Plan:
    """The division of all sharded tables over `world_size` ranks."""

    world_size: int
    tables: list[TablePlan]

    def of(self, config: EmbeddingConfig) -> TablePlan:
        """Returns the plan of a table of a collection."""
        return next(table for table in self.tables if table.table == config.name.removesuffix(SUFFIX))

    def write(self, folder: Path) -> None:
        """Writes the plan to `FILE_NAME` in a folder; `train.sharding_plan` takes this file."""
        files.write_text(folder / FILE_NAME, json.dumps(asdict(self), indent=1) + "\n")


def sharded_collections(module: nn.Module, pipeline: pb.Pipeline) -> dict[str, EmbeddingCollection]:
    """Returns the collections of a module whose tables are divided over ranks, by their names in it."""
    collections = {n: m for n, m in module.named_modules() if isinstance(m, EmbeddingCollection)}
    return {
        name: tables
        for name, tables in collections.items()
        if features.is_sharded(pipeline, tables.embedding_configs()[0].name.removesuffix(SUFFIX))
    }


def make_plan(module: nn.Module, pipeline: pb.Pipeline, world_size: int, device_type: str, room: int) -> Plan:
    """Plans the division of a module's tables as `train.sharding` says. Every rank computes the same plan.

    Args:
        module: a model with its tables in collections, which may be on the meta device.
        pipeline: the resolved config.
        world_size: number of ranks.
        device_type: "cpu" or "cuda".
        room: bytes of device memory that the tables of a rank may take, which the planner respects in its own
            choices. It does not refuse what the config demands; `memory.require_room` does.

    Raises:
        ConfigError: the planner finds no division.
    """
    collections = sharded_collections(module, pipeline)
    configs = [config for tables in collections.values() for config in tables.embedding_configs()]
    if not configs:
        return Plan(world_size, [])
    sharding = pipeline.train.sharding
    exceptions = {entry.table + SUFFIX: entry for entry in sharding.tables}
    settings = {config.name: exceptions.get(config.name, sharding) for config in configs}
    chooses = any(
        pb.Sharding.AUTO == setting.kind or pb.TableSharding.AUTO == setting.kernel
        for setting in settings.values()
    )
    planner = EmbeddingShardingPlanner(
        topology=_topology(world_size, device_type, room if chooses else _UNLIMITED),
        batch_size=pipeline.data.batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints={
            config.name: _constraints(config, settings[config.name], pipeline, world_size, device_type)
            for config in configs
        },
        debug=False,
        stats=[],
    )
    sharder = EmbeddingCollectionSharder(fused_params=fused_params(pipeline.train.sparse_optimizer))
    try:
        planned = planner.plan(nn.ModuleList(collections.values()), [sharder])
    except PlannerError as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(
            f"train.sharding: TorchRec's planner finds no division over {world_size} ranks with "
            f"{room / 2**30:.1f} GiB for tables on each ({reason}). Take more ranks, set "
            "train.sharding.kernel: FUSED_UVM_CACHING (GPU), or model.embedding.table_precision: FP16"
        ) from error
    decided = {name: choice for tables in planned.plan.values() for name, choice in tables.items()}
    return Plan(world_size, [_table_plan(config, decided[config.name], world_size) for config in configs])


def read_plan(path: str, module: nn.Module, pipeline: pb.Pipeline, world_size: int) -> Plan:
    """Reads a plan that an earlier run wrote, and checks that it fits the tables and ranks of this one.

    Raises:
        ConfigError: the file cannot be read, or lists each part of it that does not fit.
    """
    field = "train.sharding_plan"
    try:
        plan = typed_json.parse(Path(path).read_bytes(), Plan)
    except (OSError, ValueError, TypeError) as error:
        advice = f"give the {FILE_NAME} of a run folder"
        raise ConfigError(f"{field}: {path} cannot be read as a plan ({error}); {advice}") from error
    findings = []
    if plan.world_size != world_size:
        findings.append(
            f"{field}: {path} is made for {plan.world_size} processes, and this run has {world_size}; start "
            "as many, or leave the field out"
        )
    given = {table.table: table for table in plan.tables}
    wanted = {
        config.name.removesuffix(SUFFIX): config
        for tables in sharded_collections(module, pipeline).values()
        for config in tables.embedding_configs()
    }
    findings += [
        f"{field}: {path} does not name the sharded table {n!r}" for n in wanted.keys() - given.keys()
    ]
    for name, table in given.items():
        config = wanted.get(name)
        if config is None:
            findings.append(f"{field}: {path} names {name!r}, which is no sharded table of this config")
        else:
            faults = _misfits(table, config, pipeline, world_size)
            findings += [f"{field}: {path}: table {name!r}: {fault}" for fault in faults]
    if findings:
        raise ConfigError(findings)
    return plan


def _topology(world_size: int, device_type: str, room: int) -> Topology:
    # TorchRec asks to use a factory, which the versions from before 1.7 do not have.
    logger = logging.getLogger(Topology.__module__)
    logger.addFilter(_nothing)
    try:
        return Topology(
            world_size=world_size,
            compute_device=device_type,
            local_world_size=get_local_size(world_size) if world_size > 1 else 1,
            hbm_cap=room,
            ddr_cap=room if device_type == "cpu" else _UNLIMITED,
        )
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    """A filter that lets no record through."""
    return False


def _misfits(
    table: TablePlan, config: EmbeddingConfig, pipeline: pb.Pipeline, world_size: int
) -> Iterable[str]:
    shape = (config.num_embeddings, config.embedding_dim, config.data_type.name)
    if (table.rows, table.width, table.precision) != shape:
        given = f"{table.rows} x {table.width} {table.precision}"
        yield f"{given} in the file, {shape[0]} x {shape[1]} {shape[2]} in the config"
    optimizer = pipeline.train.sparse_optimizer.WhichOneof("optimizer")
    kinds = {
        "ROW_WISE": table.ranks == list(range(world_size)),
        "TABLE_WISE": len(table.ranks) == 1,
        "COLUMN_WISE": bool(table.ranks) and table.width % (4 * len(table.ranks)) == 0,
    }
    if not kinds.get(table.sharding, False):
        yield (
            f"sharding {table.sharding} over ranks {table.ranks}; allowed are ROW_WISE over all ranks, "
            "TABLE_WISE with one rank, and COLUMN_WISE in equal parts whose width is a multiple of 4"
        )
    if table.sharding == "COLUMN_WISE" and optimizer in ROW_STATES:
        yield f"COLUMN_WISE would split the state that {optimizer} has for a row"
    if not all(0 <= rank < world_size for rank in table.ranks):
        yield f"ranks {table.ranks} are not all among 0 to {world_size - 1}"
    if table.kernel not in ("FUSED", "FUSED_UVM", "FUSED_UVM_CACHING"):
        yield f"kernel {table.kernel}; allowed are FUSED, FUSED_UVM and FUSED_UVM_CACHING"
    if (table.kernel == "FUSED_UVM_CACHING") != (table.cache_load_factor is not None):
        yield "cache_load_factor belongs to FUSED_UVM_CACHING and must be null otherwise"
    elif table.cache_load_factor is not None and not 0 < table.cache_load_factor <= 1:
        yield f"cache_load_factor {table.cache_load_factor}; it must be above 0 and at most 1"


def _constraints(
    config: EmbeddingConfig,
    setting: pb.Sharding | pb.TableSharding,
    pipeline: pb.Pipeline,
    world_size: int,
    device_type: str,
) -> ParameterConstraints:
    """Returns what the planner may choose from for a table."""
    parts = _column_parts(config.embedding_dim, world_size)
    kinds = [pb.Sharding.Kind.Name(setting.kind).lower()]
    if setting.kind == pb.Sharding.AUTO:
        kinds = ["row_wise", "table_wise"]
        if parts > 1 and pipeline.train.sparse_optimizer.WhichOneof("optimizer") not in ROW_STATES:
            kinds.append("column_wise")
    kernels = [pb.TableSharding.Kernel.Name(setting.kernel).lower()]
    if setting.kernel == pb.TableSharding.AUTO:
        kernels = ["fused", "fused_uvm_caching"] if device_type == "cuda" else ["fused"]
    load_factor = setting.cache_load_factor or _PLANNED_CACHE
    per_row = ids_per_row(pipeline)
    return ParameterConstraints(
        sharding_types=kinds,
        compute_kernels=kernels,
        min_partition=config.embedding_dim // parts,
        pooling_factors=[max(per_row.get(name, 1.0), 1e-3) for name in config.feature_names],
        cache_params=CacheParams(load_factor=load_factor) if "fused_uvm_caching" in kernels else None,
    )


def _column_parts(width: int, world_size: int) -> int:
    """Returns the most equal column shards, up to `world_size`, whose width is a multiple of 4."""
    return max(n for n in range(1, world_size + 1) if n == 1 or width % (4 * n) == 0)


def _table_plan(config: EmbeddingConfig, decided: ParameterSharding, world_size: int) -> TablePlan:
    caches = decided.compute_kernel == "fused_uvm_caching"
    by_row = decided.sharding_type == "row_wise"
    return TablePlan(
        table=config.name.removesuffix(SUFFIX),
        rows=config.num_embeddings,
        width=config.embedding_dim,
        precision="FP16" if config.data_type == DataType.FP16 else "FP32",
        sharding=decided.sharding_type.upper(),
        kernel=decided.compute_kernel.upper(),
        cache_load_factor=decided.cache_params.load_factor if caches and decided.cache_params else None,
        ranks=list(range(world_size)) if by_row else list(decided.ranks or []),
    )


def ids_per_row(pipeline: pb.Pipeline) -> dict[str, float]:
    """Returns the most ids that a row of a batch has in each column that a table reads.

    A multi-valued column counts once for each event or candidate. Items that a batch shares are divided by
    its rows.
    """
    data, softmax = pipeline.data, features.model_of(pipeline).softmax
    longest = {
        pb.USER: 1.0,
        pb.HISTORY: float(data.max_history_len),
        pb.CANDIDATE: float(data.max_candidates or 1),
    }
    counts = {column.name: longest[column.side] for column in features.columns(pipeline)}
    drawn = {
        "uniform": softmax.uniform.num_negatives,
        "in_batch": softmax.in_batch.num_uniform,
        "frequency": softmax.frequency.num_negatives,
    }
    chosen = softmax.WhichOneof("negatives") or ""
    shared = features.shared_columns(pipeline)
    catalogue = features.table_rows(features.searched_item(pipeline)) - 1 if shared else 0
    items = drawn.get(chosen, catalogue) / data.batch_size
    counts |= {features.NEGATIVES: items} if shared else {}
    counts |= {features.BATCH_ITEMS: longest[pb.HISTORY]} if features.BATCH_ITEMS in shared else {}
    counts |= {column.name: items for column in features.columns(pipeline, pb.ITEM)}
    return counts
