"""Tables that no process could hold as a whole."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from recsys import config
from recsys.models import build_model
from recsys.modules import table_values
from recsys.training.distributed import process_group
from recsys.training.sharding import plan_tables, shard
from recsys.training.train_step import TrainStep
from tests.tools.forks import run_ranks

ROWS = 1_000_000
MEBI = 2**20
WHOLE = ROWS * 64 * 4
"""Bytes of the whole table."""

OVERRIDES = (f"features[0].id={{hash {{num_buckets: {ROWS}}} embedding_dim: 64}}",)


def high_water_mark() -> int:
    """The most memory in bytes that this process has used."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def build(rank: int, folder: str) -> None:
    """Builds and shards the model on one of two ranks and writes what it took and made."""
    table_values.DRAWN_WHOLE = 2**20
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with process_group() as processes:
        pipeline = config.prepare("tests/integration/tiny.config", OVERRIDES).pipeline
        before = high_water_mark()
        torch.manual_seed(7)
        step = TrainStep(build_model(pipeline, whole=False))
        wrapped = shard(step, pipeline, processes, plan_tables(step, pipeline, processes))
        grown = high_water_mark() - before
        name = "model.embed.tables.dim_64_large.embeddings.item_id_table.weight"
        (part,) = wrapped.state_dict()[name].local_shards()
        numbers = {
            "grown": grown,
            "offset": part.metadata.shard_offsets[0],
            "rows": part.tensor[::99_999].tolist(),
        }
        Path(folder, f"{rank}.json").write_text(json.dumps(numbers))
        del step, wrapped, part
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_build_a_table_without_either_holding_it(tmp_path):
    run_ranks(build, str(tmp_path))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    values = table_values.BlockNormal("item_id", 64, 0.02, seed=7)
    for rank, numbers in enumerate(seen):
        # Half of the table is 122 MiB; FBGEMM, the process group and blocks of rows take some 20 more.
        assert numbers["grown"] < WHOLE / 2 + 60 * MEBI < WHOLE
        assert numbers["offset"] == rank * ROWS // 2
        for place, row in enumerate(numbers["rows"]):
            expected = torch.empty(1, 64)
            values.fill(expected, numbers["offset"] + place * 99_999)
            assert row == expected[0].tolist()
