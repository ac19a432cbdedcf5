"""Counts the FLOP of the rank with the most work over the mean, as rows are read and after an exchange.

    python stragglers.py [--steps 20]

Nothing is trained: lengths are drawn as `synthetic` draws them for the cases of scripts/bench_scaling.py.
"""

import argparse
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from recsys.data.convert.batch_rows import BatchRows
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.training import balance
from scripts import bench_scaling

SMALL = ["data.num_workers=0", "features[1].id.hash.num_buckets=1000", "data.train.synthetic.num_rows=1024"]


def measure(case: str, steps: int) -> None:
    pipeline = bench_scaling.case_of(bench_scaling.BASE, case, SMALL)
    loader = Loader.open(pipeline, "train", layout_rule(pipeline))
    model = build_model(pipeline)
    with patch.object(balance.dist, "get_rank", lambda group: 0), patch.object(
        balance.dist, "get_world_size", lambda group: 1
    ):
        exchange = balance.RowExchange(
            BatchRows(pipeline, "train"), lambda arrays: model.flops(loader.collate(arrays)), loader.filler, 1
        )
    random, rows = np.random.default_rng(0), pipeline.data.batch_size
    lengths, weights = np.arange(1, 4097), np.ones(4096)
    if case == "zipf":
        weights = lengths**-1.2
    for ranks in (2, 4, 8, 64, 512):
        before, after = [], []
        for _ in range(steps):
            drawn = random.choice(lengths, ranks * rows, p=weights / weights.sum())
            arrays = replace(
                loader.filler(len(drawn)), uih_lengths=drawn, num_candidates=np.full(len(drawn), 8)
            )
            costs = exchange.costs(arrays)
            by_rank = np.split(costs, ranks)
            owners = np.concatenate(balance.divide(by_rank))
            before.append(max(map(np.sum, by_rank)) * ranks / costs.sum())
            after.append(np.bincount(owners, costs, ranks).max() * ranks / costs.sum())
        print(f"{case:8} {ranks:4} ranks: {np.mean(before):.3f} as read, {np.mean(after):.4f} exchanged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    for case in ("uniform", "zipf"):
        measure(case, steps)


if __name__ == "__main__":
    main()
