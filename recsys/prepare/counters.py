"""Counts what was known of an item before a period began: its impressions, and how often its labels were set.

A counter that has seen the label that it predicts looks brilliant in training and fails in serving. So time
is cut into periods, and what happens in a period counts only for later periods.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

PRIOR_POSITIVES = 5.0
"""Weight of a rate's prior, in positives, so that a rare label needs more impressions than a frequent one."""


def counter_names(key: str, labels: Sequence[str]) -> list[str]:
    """Returns the names of the columns that `count_before` makes for `key`."""
    return [f"{key}_impressions", *(f"{key}_{label}_lift" for label in labels)]


def count_before(events: pl.DataFrame, *, key: str, column: str, labels: Sequence[str]) -> pl.DataFrame:
    """Computes counters of each event's item from all events of earlier periods.

    With n earlier impressions of the item, s of them with the label, and p the share of the label among all
    earlier impressions, `<key>_impressions` is n and `<key>_<label>_lift` is logit(r) - logit(p) of the
    smoothed rate r = (s + m) / (n + m / p), m = `PRIOR_POSITIVES`. A lift of 0 means "as often as others"; an
    item without impressions has 0. The lift is also 0 if p is 0 or 1, or if there are no earlier impressions.

    Args:
        events: `column` (the item's id), `period` (integer, rising in time), `label_<label>` (0 or 1).
        key: prefix of the names of the new columns.
        column: name of the column that identifies an item.
        labels: names of labels.

    Returns:
        The columns of `counter_names`, float32, with one row per event, in the order of events.
    """
    of_item = _totals_before(events, [column], labels)
    of_all = _totals_before(events, [], labels)
    impressions = of_item["count"].to_numpy()
    counters = {f"{key}_impressions": impressions}
    for label in labels:
        with np.errstate(divide="ignore", invalid="ignore"):
            share = of_all[label].to_numpy() / of_all["count"].to_numpy()
            odds = (1 - share) / share
            positive = of_item[label].to_numpy() + PRIOR_POSITIVES
            negative = impressions - of_item[label].to_numpy() + PRIOR_POSITIVES * odds
            lift = np.log(positive / negative) + np.log(odds)
        counters[f"{key}_{label}_lift"] = np.where((share > 0) & (share < 1), lift, 0.0)
    return pl.DataFrame(counters).cast(pl.Float32)


def _totals_before(events: pl.DataFrame, keys: list[str], labels: Sequence[str]) -> pl.DataFrame:
    """Sums `count` and labels over events of earlier periods with equal `keys`; a row per event, in order."""
    sums = [pl.col(f"label_{label}").cast(pl.Float64).sum().alias(label) for label in labels]
    totals = events.group_by(*keys, "period").agg(pl.len().cast(pl.Float64).alias("count"), *sums)
    totals = totals.sort("period")
    before = [
        (pl.col(name).cum_sum().over(keys) if keys else pl.col(name).cum_sum()) - pl.col(name)
        for name in ("count", *labels)
    ]
    totals = totals.with_columns(before)
    return events.join(totals, on=[*keys, "period"], how="left", maintain_order="left")
