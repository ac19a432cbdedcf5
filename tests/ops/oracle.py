"""The maths of the ops by another route: loops over samples, heads, queries and keys, in float64.

Written from the tables and formulas of the specification, not from the code: nothing here uses the package.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """Token counts of one sample."""

    contextual: int
    uih: int
    targets: int

    @property
    def length(self) -> int:
        return self.contextual + self.uih + self.targets

    def kind(self, position: int) -> str:
        if position < self.contextual:
            return "contextual"
        return "history" if position < self.contextual + self.uih else "target"


def sees(sample: Sample, i: int, j: int, mask) -> bool:
    """The mask table, one row of it after the other."""
    query, key = sample.kind(i), sample.kind(j)
    if query == "contextual":
        return key == "contextual" or (key == "history" and mask.contextual_reads_history)
    if query == "history":
        if key == "target":
            return False
        if key == "contextual":
            return True
        near = mask.window is None or i - j < mask.window
        return j <= i and (near or j - sample.contextual < mask.prefix)
    if i == j or key == "contextual":
        return True
    first_target = sample.contextual + sample.uih
    if key == "history":
        if not mask.target_window or mask.window is None:
            return True
        is_last = j >= first_target - mask.window
        return is_last or j - sample.contextual < mask.prefix
    same_group = (i - first_target) // mask.target_group_size == (j - first_target) // mask.target_group_size
    return same_group and j < i


@functools.cache
def table(sample: Sample, mask) -> list[list[bool]]:
    """Whether row i sees key j, by i and j."""
    tokens = range(sample.length)
    return [[sees(sample, i, j, mask) for j in tokens] for i in tokens]


def bucket(seconds: int, num_buckets: int) -> int:
    return min(num_buckets - 1, math.floor(math.log(max(1, abs(seconds))) / 0.301))


def place(sample: Sample, position: int, group_size: int) -> int:
    """`r`: the index in the sample, but each target group starts directly behind the history."""
    behind = sample.contextual + sample.uih
    return position if position < behind else behind + (position - behind) % group_size


def bias_at(bias, sample: Sample, start: int, i: int, j: int, head: int, group_size: int) -> Tensor:
    position_table = bias.position_table if bias.position_table.dim() == 1 else bias.position_table[head]
    time_table = bias.time_table if bias.time_table.dim() == 1 else bias.time_table[head]
    distance = place(sample, i, group_size) - place(sample, j, group_size)
    distance = max(0, min(distance, len(position_table) - 1))
    elapsed = int(bias.next_timestamps[start + i]) - int(bias.timestamps[start + j])
    return position_table[distance] + time_table[bucket(elapsed, len(time_table))]


def hstu(q: Tensor, k: Tensor, v: Tensor, samples: list[Sample], mask, alpha, scale_len, bias=None) -> Tensor:
    """`hstu_attention`, [T, H, V]; autograd through it gives the gradients."""

    def weights(scores: list[Tensor]) -> list[Tensor]:
        return [score * torch.sigmoid(score) / scale_len for score in scores]

    return _attend(q, k, v, samples, mask, alpha, bias, weights)


def softmax(q: Tensor, k: Tensor, v: Tensor, samples: list[Sample], mask, alpha) -> Tensor:
    """`softmax_attention`, [T, H, V]."""

    def weights(scores: list[Tensor]) -> list[Tensor]:
        exponentials = [torch.exp(score) for score in scores]
        return [exponential / sum(exponentials) for exponential in exponentials]

    return _attend(q, k, v, samples, mask, alpha, None, weights)


def _attend(q, k, v, samples, mask, alpha, bias, weights) -> Tensor:
    rows, start = [], 0
    for sample in samples:
        for i in range(sample.length):
            keys = [j for j in range(sample.length) if sees(sample, i, j, mask)]
            row = []
            for head in range(q.shape[1]):
                scores = []
                for j in keys:
                    score = alpha * (q[start + i, head] * k[start + j, head]).sum()
                    if bias is not None:
                        score = score + bias_at(bias, sample, start, i, j, head, mask.target_group_size)
                    scores.append(score)
                row.append(sum(w * v[start + j, head] for w, j in zip(weights(scores), keys, strict=True)))
            rows.append(torch.stack(row))
        start += sample.length
    if rows:
        return torch.stack(rows)
    tables = () if bias is None else (bias.position_table, bias.time_table)
    return v * sum(tensor.sum() for tensor in (q, k, *tables))  # without rows, but with all gradients
