"""Rows of a table are read from the files of a checkpoint, however it was divided."""

import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from recsys.errors import RecsysError
from recsys.inference import mapped_tables
from recsys.training.stored_table import StoredTable

NAME = "model.embed.tables.dim_6.embeddings.item_table.weight"
CUTS = {
    "whole": [(0, 0, 90, 6)],
    "rows": [(0, 0, 40, 6), (40, 0, 50, 6)],
    "columns": [(0, 0, 90, 2), (0, 2, 90, 4)],
    "grid": [(0, 0, 40, 2), (0, 2, 40, 4), (40, 0, 50, 2), (40, 2, 50, 4)],
}


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(folder, **tensors) -> None:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_those_that_were_saved(tmp_path, cut, dtype):
    table = torch.randn(90, 6).to(dtype)
    shards = [
        Shard.from_tensor_and_offsets(table[r : r + h, c : c + w].contiguous(), [r, c], 0)
        for r, c, h, w in CUTS[cut]
    ]
    save(tmp_path, **{NAME: ShardedTensor._init_from_local_shards(shards, 90, 6), "model.x": torch.ones(3)})
    stored = StoredTable(tmp_path, "item")
    assert (stored.rows, stored.width) == (90, 6)
    for start, stop in ((0, 90), (33, 47), (89, 90), (7, 7)):
        assert np.array_equal(stored.read(start, stop), table[start:stop].numpy())
    rows = torch.tensor([89, 0, 39, 40, 40])
    assert torch.equal(stored.look_up(rows), table[rows].float())


def test_averages_replace_the_weights_of_the_last_step(tmp_path):
    last, average = torch.randn(9, 6), torch.randn(9, 6)
    optimizer = {f"optimizer.{NAME.removeprefix('model.')}": torch.randn(9, 6)}
    save(tmp_path, **{NAME: last, NAME.replace("model.", "average."): average, **optimizer})
    assert np.array_equal(StoredTable(tmp_path, "item").read(0, 9), average.numpy())
    with pytest.raises(RecsysError, match="it has 0 tables user, not one"):
        StoredTable(tmp_path, "user")


def test_a_table_is_packaged_without_the_memory_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_tables, "_BLOCK_BYTES", 1 << 20)
    table = torch.randn(200_000, 40)
    save(tmp_path / "state", **{NAME: table})
    (tmp_path / "package").mkdir()
    tracemalloc.start()
    stored = StoredTable(tmp_path / "state", "item")
    written = mapped_tables.write_tables(tmp_path / "package", {"item": stored}, 0)
    rows = torch.tensor([199_999, 0, 77_777])
    assert torch.equal(written["item"].look_up(rows), table[rows])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One block that was read, its file's numbers, and the block before it.
    assert peak < 4 << 20 < table.nbytes / 7
    assert np.array_equal(np.load(tmp_path / "package" / "tables" / "item.npy"), table.numpy())
