"""Sums the metrics of targets by how often training has seen their items."""

import numpy as np
import torch
from torch import Tensor

from recsys.data.batch import Batch
from recsys.models.next_item import NextItemModel
from recsys.modules.metrics.base import RankMean

GROUPS = ("head", "middle", "tail", "new")
"""The most frequent items with a third of all training events, those with the next third, the others with at
least one event, and items without any."""


def popularity_groups(counts: np.ndarray) -> np.ndarray:
    """Returns the group of each row of the item table, int64, an index into `GROUPS`; -1 for row 0.

    An item belongs to the third in which the middle of its events lies. Of equal counts, the item that comes
    first in the table is the more frequent one.

    Args:
        counts: [rows], training events of each item; row 0 is not an item.
    """
    of_items = counts[1:].astype(np.float64)
    order = np.argsort(-of_items, kind="stable")
    ends = np.cumsum(of_items[order])
    total = max(ends[-1], 1.0) if len(ends) else 1.0
    middles = (ends - of_items[order] / 2) / total
    groups = np.empty(len(counts), np.int64)
    groups[0] = -1
    groups[1 + order] = np.minimum((3 * middles).astype(np.int64), 2)
    groups[1:][of_items == 0] = GROUPS.index("new")
    return groups


def popularity_sums(model: NextItemModel, batch: Batch, groups: Tensor) -> dict[str, Tensor]:
    """Sums the metrics of the config over the candidates of each group, and the weights of all candidates.

    Metrics that are not means over targets, which other packages may add, are left out.

    Args:
        groups: int64 [rows of the item table], from `popularity_groups`.

    Returns:
        By name, such as `ndcg@10/tail` and, for the share of a group, `targets/tail`: float64 [2], numerator
        and denominator.
    """
    ranks, weights = model.metric_rows(model(batch), batch)[""]
    group = groups.to(ranks.device)[batch.ids[model.candidates].values()]
    weights, sums = weights.double(), {}
    for index, name in enumerate(GROUPS):
        chosen = group == index
        of_group = weights * chosen
        sums[f"targets/{name}"] = torch.stack([of_group.sum(), weights.sum()])
        for metric_name, metric in model.metrics().items():
            if isinstance(metric, RankMean):
                gain = (metric.gain(ranks.double()) * of_group).sum()
                sums[f"{metric_name}/{name}"] = torch.stack([gain, of_group.sum()])
    return sums
