"""Tables that no process could hold as a whole, overflows on several ranks, and kernels of GPUs."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recsys import config
from recsys import protos as pb
from recsys.models import build_model
from recsys.modules import table_values
from recsys.training.distributed import process_group
from recsys.training.loss_scaling import LossScaler
from recsys.training.optimizers import dense_optimizer
from recsys.training.sharding import plan_tables, shard
from recsys.training.train_step import TrainStep
from tests.integration.runs import records, train
from tests.tools.forks import run_ranks

ROWS = 600_000
MEBI = 2**20
WHOLE = ROWS * 64 * 4
"""Bytes of the whole table."""

OVERRIDES = (f"features[0].id={{hash {{num_buckets: {ROWS}}} embedding_dim: 64}}",)


def high_water_mark() -> int:
    """The most memory in bytes that this process has used, without the code of libraries that it has mapped.

    A forked process maps that code anew as it runs, and the kernel maps more or fewer pages around each.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "RssFile"))}
    return (int(sizes["VmHWM"]) - int(sizes["RssFile"])) * 1024


def overflow(rank: int, device: torch.device) -> list[float]:
    """Loss scale after a step in which gradients of rows overflow on rank 1 only, and after the next step."""
    model, scaler, scales = Rows(), LossScaler(device), []
    scaler.watch(model.loss)
    model.divide = scaler.dividing(["item"])
    optimizer = dense_optimizer(model, pb.DenseOptimizer(sgd=pb.Sgd(lr=1)))
    for step, factor in enumerate((torch.inf if rank == 1 else 1.0, 1.0), start=1):
        optimizer.zero_grad()
        model(factor).backward()
        scaler.unscale(optimizer, [model.weight.grad])
        scaler.step(optimizer, step)
        scales.append(scaler.tensor()[0].item())
    return scales


class Rows(nn.Module):
    """Looked-up rows whose gradients can overflow while those of the dense weight do not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.loss, self.divide = Loss(), dict

    def forward(self, factor: float) -> torch.Tensor:
        item = self.divide({"item": torch.ones(3, requires_grad=True)})["item"]
        item.register_hook(lambda gradient: gradient * factor)
        return self.loss(item.sum() + self.weight)[0]


class Loss(nn.Module):
    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        return value, None


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
            "rows": part.tensor[::59_999].tolist(),
        }
        numbers["scales"] = overflow(rank, processes.device)
        Path(folder, f"{rank}.json").write_text(json.dumps(numbers))
        del step, wrapped, part
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_build_a_table_without_either_holding_it(tmp_path):
    run_ranks(build, str(tmp_path))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    values = table_values.BlockNormal("item_id", 64, 0.02, seed=7)
    for rank, numbers in enumerate(seen):
        # Half of the table is 73 MiB; FBGEMM, the process group and blocks of rows take some 8 more.
        assert numbers["grown"] < WHOLE / 2 + 30 * MEBI < WHOLE
        assert numbers["offset"] == rank * ROWS // 2
        assert numbers["scales"] == [32768, 32768]
        for place, row in enumerate(numbers["rows"]):
            expected = torch.empty(1, 64)
            values.fill(expected, numbers["offset"] + place * 59_999)
            assert row == expected[0].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("override", "tolerance"),
    [
        ("train.unique_ids=true", 1e-5),
        ("train.sharding={kernel: FUSED_UVM}", 1e-5),
        ("train.sharding={kernel: FUSED_UVM_CACHING cache_load_factor: 0.1}", 1e-5),
        ("train.sharding={kind: AUTO kernel: AUTO}", 1e-5),
        ("model.embedding.table_precision=FP16", 1e-2),
        ("model.precision=FP16", 1e-2),
    ],
)
def test_other_forms_on_a_gpu_have_the_losses_of_float32_tables_in_gpu_memory(tmp_path, override, tolerance):
    for name, overrides in (("plain", ()), ("changed", (override,))):
        assert train(tmp_path / name, "train.num_steps=8", *overrides) == 0
    expected, actual = records(tmp_path / "plain"), records(tmp_path / "changed")
    assert sorted(expected) == sorted(actual) == list(range(1, 9))
    for step in expected:
        assert actual[step]["losses"] == pytest.approx(expected[step]["losses"], rel=tolerance)
