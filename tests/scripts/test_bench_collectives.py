"""Two ranks time collectives, whose rates are those of nccl-tests; a wrong result is not timed."""

import json

import pytest
import torch
import torch.distributed as dist

from recsys.errors import RecsysError
from recsys.training.distributed import process_group
from scripts import bench_collectives
from tests.tools.forks import run_ranks


def measure(rank: int, store: str, record: str) -> None:
    """Runs the script on one of two ranks; afterwards, with a collective that leaves its input alone."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    flags = ["--sizes", "8000", "90", "--calls", "3", "--record", record, "--commit", "x"]
    assert bench_collectives.main(flags) == 0
    with process_group() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
        with pytest.raises(RecsysError, match="^all_reduce: the result is wrong"):
            bench_collectives.measure("all_reduce", 8, bench_collectives._options([]), processes)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_are_measured(tmp_path):
    record = tmp_path / "record.json"
    run_ranks(measure, str(tmp_path / "store"), str(record))
    entries = json.loads(record.read_text())
    # 90 bytes are 11.25 float32 numbers for each of two ranks, rounded up.
    assert [(entry["collective"], entry["size"]) for entry in entries] == [
        ("all_reduce", 96),
        ("all_reduce", 8000),
        ("all_to_all", 96),
        ("all_to_all", 8000),
    ]
    for entry in entries:
        # With two ranks, a rank sends half of its bytes, in an all-reduce twice.
        share = {"all_reduce": 1.0, "all_to_all": 0.5}[entry["collective"]]
        assert entry["gb_per_s"] == pytest.approx(share * entry["size"] / entry["us"] / 1e3)


def test_a_single_process_is_an_error(capsys):
    assert bench_collectives.main([]) == 2
    assert "start at least two with torchrun" in capsys.readouterr().err
