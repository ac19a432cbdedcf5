"""Measures what sending each id of a batch once saves in the exchange of a row-wise table, on gloo ranks.

    OMP_NUM_THREADS=1 python experiments/2026-11-27-unique-ids/measure.py

Every rank sends the ids of its batch to the ranks of their rows, gets the rows, sends their gradients back and
adds them up, as TorchRec does for a row-wise table; FBGEMM's op for unique ids has no CPU kernel, so
`torch.unique` takes its place. Ids come from histories of the KuaiRand and MovieLens samples, or are drawn.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import recsys.config as config
from recsys.data.loader import Loader
from recsys.data.schema.row_layout import ShardedRowLayout
from recsys.models import layout_rule

WIDTH, STEPS = 64, 12


def sample(path: str, column: str, overrides: list[str]) -> tuple[list[np.ndarray], int]:
    """Ids of the batches of a config, in the order of their vocabulary, and the number of ids."""
    pipeline = config.prepare(path, [*overrides, "model.embedding.placement=REPLICATED"]).pipeline
    batches = Loader.open(pipeline, "train", layout_rule(pipeline)).epoch()
    ids = [batch.ids[column].values().numpy() for batch in batches]
    (feature,) = (f for f in pipeline.features if column.endswith("_" + f.name))
    return [x[x > 0] - 1 for x in ids], feature.id.vocabulary.size


def drawn(count: int, exponent: float, per_batch: int) -> tuple[list[np.ndarray], int]:
    """Ids whose frequencies follow Zipf's law."""
    weights = np.arange(1, count + 1) ** -exponent
    edges = np.cumsum(weights / weights.sum())
    random = np.random.default_rng(0)
    return [np.searchsorted(edges, random.random(per_batch)) for _ in range(2 * STEPS)], count


def exchange(ids: torch.Tensor, table: torch.Tensor, world_size: int, unique: bool) -> int:
    """One forward and backward exchange; returns the bytes that this rank sends to others."""
    sent, inverse = torch.unique(ids, return_inverse=True) if unique else (ids, None)
    owner = sent // len(table)
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=world_size)
    asked = torch.empty_like(counts)
    dist.all_to_all_single(asked, counts)
    outward, inward = counts.tolist(), asked.tolist()
    wanted = torch.empty(sum(inward), dtype=torch.int64)
    dist.all_to_all_single(wanted, sent[order], inward, outward)
    rows = torch.empty(sum(outward), WIDTH)
    dist.all_to_all_single(rows, table[wanted % len(table)], outward, inward)
    vectors = torch.empty_like(rows)
    vectors[order] = rows
    vectors = vectors if inverse is None else vectors[inverse]
    gradients = vectors * 0.5
    if inverse is not None:
        gradients = torch.zeros(len(sent), WIDTH).index_add_(0, inverse, gradients)
    arrived = torch.empty(sum(inward), WIDTH)
    dist.all_to_all_single(arrived, gradients[order], inward, outward)
    table.index_add_(0, wanted % len(table), arrived, alpha=-1e-9)
    away = sum(outward) - outward[dist.get_rank()]
    back = sum(inward) - inward[dist.get_rank()]
    return away * 8 + back * WIDTH * 4 + away * WIDTH * 4


def main(rank: int, world_size: int, folder: str, batches: list[np.ndarray], count: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    layout, block = ShardedRowLayout(count, "item_id"), -(-(count + 1) // world_size)
    steps = min(STEPS, len(batches) // world_size)
    mine = [torch.from_numpy(layout.row_of(x)) for x in batches[rank::world_size][:steps]]
    table, result = torch.zeros(block, WIDTH), {}
    for unique in (False, True, False, True):
        began, size = time.perf_counter(), 0
        for ids in mine:
            size += exchange(ids, table, world_size, unique)
        result["unique" if unique else "all"] = (size / len(mine), (time.perf_counter() - began) / len(mine))
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def load(batches: list[np.ndarray], count: int, ranks: int, dealt: bool, unique: bool) -> float:
    """Ids that the busiest of `ranks` answers over the mean, if every rank has batches like these."""
    layout, block = ShardedRowLayout(count, "item_id" if dealt else None), -(-(count + 1) // ranks)
    total = np.zeros(ranks)
    for ids in batches:
        rows = layout.row_of(np.unique(ids) if unique else ids)
        total += np.bincount(rows // block, minlength=ranks)
    return float(total.max() / total.mean())


if __name__ == "__main__":
    print("ids                      a batch  unique  MB sent     ms a step   busiest rank of 64 over the mean")
    print("                                         all  once   all   once  listed  dealt  dealt, once")
    kuairand = ["data.batch_size=64", "data.num_workers=0", "data.max_history_len=200"]
    for name, batches, count in (
        ("KuaiRand sample", *sample("configs/quickstart.config", "uih_item_id", kuairand)),
        (
            "MovieLens sample",
            *sample("configs/movielens_small_retrieval.config", "uih_item_id", ["data.num_workers=0"]),
        ),
        ("Zipf 1.05, 1M ids", *drawn(1_000_000, 1.05, 12_800)),
        ("Zipf 1.05, 1M ids, large", *drawn(1_000_000, 1.05, 65_536)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(main, args=(2, folder, batches, count), nprocs=2)
            result = json.loads(Path(folder, "result.json").read_text())
        total = np.mean([len(x) for x in batches])
        unique = np.mean([len(np.unique(x)) for x in batches])
        loads = [load(batches, count, 64, *how) for how in ((False, False), (True, False), (True, True))]
        (all_bytes, all_time), (once_bytes, once_time) = result["all"], result["unique"]
        print(
            f"{name:24} {total:8,.0f} {unique:7,.0f} {all_bytes / 1e6:5.2f} {once_bytes / 1e6:5.2f} "
            f"{all_time * 1e3:6.1f} {once_time * 1e3:6.1f} {loads[0]:7.2f} {loads[1]:6.2f} {loads[2]:12.2f}"
        )
