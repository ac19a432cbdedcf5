"""How sure a GAUC is: standard errors over users, of models, of item popularity and of their difference.

    PYTHONPATH=. python experiments/2026-11-22-kuairand-like/bootstrap.py --data data/kuairand runs/s1 runs/s2

Users are drawn with replacement 2,000 times; "mean" is the mean of the runs' GAUC on the same users.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import polars as pl
import torch

from recsys import config
from recsys.data.loader import Loader
from recsys.environment import import_torchrec_quietly
from scripts import popularity_baseline as popularity

TASKS = ("is_click", "long_view", "is_like")


def scores(run: Path, split: str) -> dict[str, np.ndarray]:
    """Task -> predictions of the run's best state, candidates in the order of the file."""
    import_torchrec_quietly()
    from recsys.training import checkpoint
    from recsys.training.distributed import process_group
    from recsys.training.run import CHECKPOINTS, TrainStep, build_model, layout_rule, shard

    pipeline = config.resolve(config.load(run / "config.resolved")).pipeline
    with process_group() as processes, torch.no_grad():
        step = TrainStep(build_model(pipeline))
        wrapped = shard(step, pipeline, processes)
        checkpoint.load(checkpoint.find(run / CHECKPOINTS, "best"), wrapped.state_dict(), checkpoint.MODEL)
        step.model.eval()
        # Only predicting keeps the order of the file.
        batches = Loader(pipeline, split, layout_rule(pipeline), mode="predict").epoch(0)
        found = [step.model(batch.to(processes.device)).predictions for batch in batches]
    return {task: torch.cat([one[task] for one in found]).numpy() for task in TASKS}


def user_aucs(score: np.ndarray, truth: np.ndarray, user: np.ndarray) -> pl.DataFrame:
    """`auc` and `count` of each user that has both classes."""
    frame = pl.DataFrame({"user": user, "score": score.astype(np.float64), "truth": truth})
    rows = [
        (popularity.auc(one["score"].to_numpy(), one["truth"].to_numpy()), one.height)
        for one in frame.sort("user", maintain_order=True).partition_by("user", maintain_order=True)
        if 0 < one["truth"].sum() < one.height
    ]
    return pl.DataFrame(rows, schema=["auc", "count"], orient="row")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("runs", type=Path, nargs="+")
    flags = parser.parse_args()
    schema = json.loads((flags.data / "schema.json").read_text())
    labels = [f"candidate_{task}" for task in TASKS]
    train, judged = (
        popularity._read(flags.data, schema, part, ["user_id", "candidate_item_id", *labels]).explode(
            ["candidate_item_id", *labels]
        )
        for part in ("train", flags.split)
    )
    user = judged["user_id"].to_numpy()
    baseline = popularity.ranking_baseline(flags.data, schema, flags.split)
    found = [scores(run, flags.split) for run in flags.runs]
    for task in TASKS:
        truth = judged[f"candidate_{task}"].to_numpy()
        strength = baseline[f"{task}/smoothing"]
        peer = popularity.item_means(train, judged, f"candidate_{task}", strength)
        report(task, [one[task] for one in found], peer, truth, user)


def report(
    task: str, models: list[np.ndarray], peer: np.ndarray, truth: np.ndarray, user: np.ndarray
) -> None:
    """Prints GAUC and its standard error."""
    tables = [user_aucs(score, truth, user) for score in (*models, peer)]
    count = tables[0]["count"].to_numpy().astype(np.float64)
    aucs = np.stack([table["auc"].to_numpy() for table in tables])
    draws = np.random.default_rng(0).multinomial(len(count), np.full(len(count), 1 / len(count)), 2000)
    weights = draws * count
    sampled = weights @ aucs.T / weights.sum(1, keepdims=True)
    exact = aucs @ count / count.sum()
    sampled_mean, mean = sampled[:, :-1].mean(1), exact[:-1].mean()
    print(f"{task}: {len(count)} users with both classes, {count.sum():.0f} candidates")
    for number, value in enumerate(exact[:-1]):
        print(f"  run {number + 1}       {value:.4f} ± {sampled[:, number].std():.4f}")
    print(f"  mean        {mean:.4f} ± {sampled_mean.std():.4f}")
    print(f"  popularity  {exact[-1]:.4f} ± {sampled[:, -1].std():.4f}")
    difference = sampled_mean - sampled[:, -1]
    ahead = (difference > 0).mean()
    print(f"  difference  {mean - exact[-1]:.4f} ± {difference.std():.4f}, above 0 in {ahead:.1%}")


if __name__ == "__main__":
    main()
