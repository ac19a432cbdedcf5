"""Counts correctly ordered pairs of a positive and a negative, for all groups at once."""

from typing import NamedTuple

import torch
from torch import Tensor


class GroupAuc(NamedTuple):
    """The AUC of each group that has rows, in ascending order of groups.

    Attributes:
        auc: [G] float64; NaN where a class is missing.
        weight: [G] float64, sum of the weights of the group's rows.
        defined: [G] bool, whether both classes occur.
    """

    auc: Tensor
    weight: Tensor
    defined: Tensor


def auc_by_group(predictions: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> GroupAuc:
    """Computes the share of each group's (positive, negative) pairs with a higher prediction of the positive.

    Ties count half. The function sorts once by (group, prediction) and sums over runs of equal predictions,
    without a loop over groups.

    Args:
        predictions: [n]. A NaN among them makes every value NaN.
        labels: [n], positive above 0.5.
        weights: [n]; a row of weight w counts as w rows.
        groups: [n] int64.
    """
    keep = weights > 0
    predictions, labels, groups = predictions[keep], labels[keep], groups[keep]
    by_prediction = torch.argsort(predictions)
    order = by_prediction[torch.argsort(groups[by_prediction], stable=True)]
    predictions, groups = predictions[order], groups[order]
    weight, is_positive = weights[keep][order].double(), labels[order] > 0.5

    starts_group = _changes(groups)
    starts_run = starts_group | _changes(predictions)
    group_of_run = (starts_group.cumsum(0) - 1)[starts_run]
    first_run = starts_group[starts_run].nonzero().squeeze(1)
    run_of_row = starts_run.cumsum(0) - 1

    positive = _sums(weight * is_positive, run_of_row, len(group_of_run))
    negative = _sums(weight * ~is_positive, run_of_row, len(group_of_run))
    below = negative.cumsum(0) - negative
    below = below - below[first_run][group_of_run]
    wins = _sums(positive * (below + negative / 2), group_of_run, len(first_run))
    positives = _sums(positive, group_of_run, len(first_run))
    negatives = _sums(negative, group_of_run, len(first_run))

    auc = wins / (positives * negatives)
    auc = torch.where(predictions.isnan().any(), torch.nan, auc)
    return GroupAuc(auc, positives + negatives, (positives > 0) & (negatives > 0))


def _changes(values: Tensor) -> Tensor:
    """Marks the first element and each element that differs from its predecessor, bool [n]."""
    changed = torch.ones_like(values, dtype=torch.bool)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _sums(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    return values.new_zeros(num_segments).index_add(0, segment, values)
