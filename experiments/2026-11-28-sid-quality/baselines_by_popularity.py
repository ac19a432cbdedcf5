"""Prints NDCG@10 and HR@10 of the baselines by how often training has seen the target's item.

    python experiments/2026-11-28-sid-quality/baselines_by_popularity.py CONFIG     # such as those in the folder of runs
"""

import sys

import numpy as np
from pyarrow import parquet

from recsys import config
from recsys.config.declarations import model_of
from recsys.evaluation.baselines import measure, metrics
from recsys.evaluation.interactions import read
from recsys.models.popularity import GROUPS, popularity_groups


def main(path: str) -> None:
    pipeline = config.prepare(path, []).pipeline
    counts = parquet.read_table(f"{pipeline.data.vocabulary_dir}/item_id.parquet")["count"].to_numpy()
    groups, rows = popularity_groups(np.concatenate([[0], counts])), read(pipeline, "test")
    group_of_target = groups[rows.targets]
    for baseline in measure(pipeline):
        parts = {"all": np.ones(len(rows.lengths), bool)}
        parts |= {name: group_of_target == number for number, name in enumerate(GROUPS)}
        for name, chosen in parts.items():
            found = metrics(baseline.baseline, rows.select(chosen), pipeline, model_of(pipeline).seen_rule)
            print(f"{baseline.name:24} {name:7} {chosen.mean():.3f} {found['ndcg@10']:.4f} {found['hit_rate@10']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
