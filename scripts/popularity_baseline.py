"""Measures a baseline without a model on prepared data: ranking items by their popularity alone.

    python scripts/popularity_baseline.py --data data/kuairand
    python scripts/popularity_baseline.py --data data/ml-1m

Ranking: a candidate's score is its item's smoothed share of positives (regression: smoothed mean) among
training candidates, (sum + k * mean) / (count + k), with the k of {1, 10, 100, 1000} that has the best AUC
(regression: mean squared error) on validation; `exposure` scores by the number of training candidates. AUC
over all candidates, GAUC within users weighted by their candidates, ties count half.
Retrieval: an item's score is its number of training events; the whole catalogue is ranked, items of the
newest --max-history events removed, ties against the target.

It reads the parquet files with polars and numpy and shares no code, hence no error, with the package.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import polars as pl

STRENGTHS = (1, 10, 100, 1000)
LENGTHS = (1, 10, 50, 200)


def main(arguments: list[str] | None = None) -> int:
    """Prints one line per figure, or all of them as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, required=True, help="folder made by python -m recsys.prepare")
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument(
        "--max-history", type=int, default=200, help="events whose items are not recommended again"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    schema_file = options.data / "schema.json"
    if not schema_file.is_file():
        sys.stderr.write(
            f"error: {schema_file}: no such file; --data takes a folder made by python -m recsys.prepare\n"
        )
        return 2
    schema = json.loads(schema_file.read_text(encoding="utf-8"))
    if schema["task"] == "ranking":
        figures = ranking_baseline(options.data, schema, options.split)
    else:
        figures = retrieval_baseline(options.data, schema, options.split, options.max_history)
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name:32s} {value:.4f}")
    return 0


def ranking_baseline(folder: Path, schema: dict, split: str) -> dict[str, float]:
    """Computes figures on the candidates of `split`: `<label>/<metric>` -> value."""
    labels = [f"candidate_{name}" for name in schema["labels"]]
    train, validation, judged = (
        _read(folder, schema, part, ["user_id", "candidate_item_id", *labels]).explode(
            ["candidate_item_id", *labels]
        )
        for part in ("train", "validation", split)
    )
    figures: dict[str, float] = {}
    for name, kind in schema["labels"].items():
        label = f"candidate_{name}"
        scores = {k: item_means(train, validation, label, k) for k in STRENGTHS}
        truth = validation[label].to_numpy()
        if kind == "binary":
            strength = max(STRENGTHS, key=lambda k: np.nan_to_num(auc(scores[k], truth)))
        else:
            strength = min(STRENGTHS, key=lambda k: np.mean((scores[k] - truth) ** 2))
        score, truth = item_means(train, judged, label, strength), judged[label].to_numpy()
        base = float(train[label].mean())
        if kind == "binary":
            exposure = item_counts(train, judged)
            user = judged["user_id"].to_numpy()
            figures |= {
                f"{name}/auc": auc(score, truth),
                f"{name}/gauc": gauc(score, truth, user),
                f"{name}/normalized_entropy": log_loss(score, truth) / entropy(float(truth.mean())),
                f"{name}/auc of exposure": auc(exposure, truth),
                f"{name}/gauc of exposure": gauc(exposure, truth, user),
            }
        else:
            figures |= {
                f"{name}/mae": float(np.abs(score - truth).mean()),
                f"{name}/mse": float(((score - truth) ** 2).mean()),
                f"{name}/mse of the mean": float(((base - truth) ** 2).mean()),
            }
        figures[f"{name}/smoothing"] = strength
    return figures


def retrieval_baseline(folder: Path, schema: dict, split: str, max_history: int) -> dict[str, float]:
    """Computes figures on the held-out items of `split`: metric -> value."""
    train = _read(folder, schema, "train", ["uih_item_id"])
    judged = _read(folder, schema, split, ["uih_item_id", "candidate_item_id"])
    catalogue = pl.read_parquet(folder / "vocabulary" / "item_id.parquet").select(item="id")
    counts = train.select(item=pl.col("uih_item_id")).explode("item").group_by("item").agg(count=pl.len())
    scored = catalogue.join(counts, on="item", how="left").with_columns(pl.col("count").fill_null(0))
    score = dict(zip(scored["item"].to_list(), scored["count"].to_list(), strict=True))
    ordered = np.sort(scored["count"].to_numpy())
    ranks = []
    for history, candidates in judged.iter_rows():
        target = candidates[0]
        limit = score.get(target, -1)
        as_good = len(ordered) - np.searchsorted(ordered, limit, side="left") - (target in score)
        seen = set(history[-max_history:]) - {target}
        ranks.append(1 + as_good - sum(score[item] >= limit for item in seen if item in score))
    return retrieval_metrics(np.array(ranks))


def retrieval_metrics(ranks: np.ndarray) -> dict[str, float]:
    """Computes HR@k, NDCG@k and MRR of the ranks (1 is best) of one target per row."""
    gain = 1 / np.log2(1 + ranks)
    figures = {f"hit_rate@{k}": float((ranks <= k).mean()) for k in LENGTHS}
    figures |= {f"ndcg@{k}": float(np.where(ranks <= k, gain, 0).mean()) for k in LENGTHS[1:]}
    return figures | {"mrr": float((1 / ranks).mean())}


def item_means(train: pl.DataFrame, judged: pl.DataFrame, label: str, strength: float) -> np.ndarray:
    """Scores judged candidates by the smoothed training mean of their item's label; new items by the mean."""
    base = train[label].mean()
    means = train.group_by("candidate_item_id").agg(total=pl.col(label).sum(), count=pl.len())
    means = means.select(
        "candidate_item_id", score=(pl.col("total") + strength * base) / (pl.col("count") + strength)
    )
    joined = judged.join(means, on="candidate_item_id", how="left", maintain_order="left")
    return joined["score"].fill_null(base).to_numpy()


def item_counts(train: pl.DataFrame, judged: pl.DataFrame) -> np.ndarray:
    """Scores judged candidates by the number of their item's training candidates."""
    counts = train.group_by("candidate_item_id").agg(score=pl.len().cast(pl.Float64))
    joined = judged.join(counts, on="candidate_item_id", how="left", maintain_order="left")
    return joined["score"].fill_null(0).to_numpy()


def auc(score: np.ndarray, truth: np.ndarray) -> float:
    """Computes the probability that a positive outscores a negative, ties half; NaN with one class only."""
    value, place = np.unique(score, return_inverse=True)
    positives = np.bincount(place, weights=truth > 0, minlength=len(value))
    negatives = np.bincount(place, weights=truth <= 0, minlength=len(value))
    pairs = positives.sum() * negatives.sum()
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else float("nan")


def gauc(score: np.ndarray, truth: np.ndarray, user: np.ndarray) -> float:
    """Averages the AUC of users with both classes, weighted by their number of candidates."""
    order = np.argsort(user, kind="stable")
    sorted_users = user[order]
    bounds = np.flatnonzero(sorted_users[1:] != sorted_users[:-1]) + 1
    total = weight = 0.0
    for index in np.split(order, bounds):
        of_user = auc(score[index], truth[index])
        if not np.isnan(of_user):
            total += of_user * len(index)
            weight += len(index)
    return total / weight if weight else float("nan")


def log_loss(probability: np.ndarray, truth: np.ndarray) -> float:
    """Computes the mean binary cross-entropy."""
    p = np.clip(probability, 1e-7, 1 - 1e-7)
    return float(-np.where(truth > 0, np.log(p), np.log1p(-p)).mean())


def entropy(rate: float) -> float:
    """Computes the entropy of a constant base rate, in nats."""
    return -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if 0 < rate < 1 else float("nan")


def _read(folder: Path, schema: dict, split: str, columns: list[str]) -> pl.DataFrame:
    files = [folder / name for name in schema["splits"][split]["files"]]
    return pl.concat([pl.read_parquet(file, columns=columns) for file in files])


if __name__ == "__main__":
    sys.exit(main())
