"""Inputs that the tests of several ops share."""

import itertools
from typing import NamedTuple

import torch

from recsys.ops import AttentionMask, CachedRelativeBias, RelativeBias, SequenceLayout
from tests.ops.oracle import Sample

# (history, targets) of the samples of a batch: both, targets only, neither, history only, many targets.
SHAPES = ((5, 3), (0, 2), (0, 0), (6, 0), (1, 4))

MASKS = [
    AttentionMask(window, prefix, target_window, group, contextual_reads_history)
    for window, prefix, target_window, group, contextual_reads_history in itertools.product(
        (None, 1, 3), (0, 2), (False, True), (1, 2), (True, False)
    )
]


def samples(contextual: int, shapes=SHAPES) -> list[Sample]:
    return [Sample(contextual, uih, targets) for uih, targets in shapes]


def layout_of(batch: list[Sample]) -> SequenceLayout:
    return SequenceLayout(
        torch.tensor([sample.length for sample in batch], dtype=torch.int64),
        torch.tensor([sample.targets for sample in batch], dtype=torch.int64),
        batch[0].contextual if batch else 0,
    )


def qkv(total_len: int, *, heads=2, dim=3, v_dim=2, seed=0, dtype=torch.float64) -> list[torch.Tensor]:
    """q, k and v with gradients; the scores are large enough for SiLU to be far from linear."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (2 * torch.randn(total_len, heads, width, generator=generator, dtype=dtype)).requires_grad_()
        for width in (dim, dim, v_dim)
    ]


def times(total_len: int, seed=0) -> list[torch.Tensor]:
    """Timestamps and next timestamps of today, apart by seconds to months."""
    generator = torch.Generator().manual_seed(seed)
    gaps = (torch.rand(2, total_len, generator=generator, dtype=torch.float64) * 16).exp().to(torch.int64)
    timestamps = 1_763_000_000 + gaps[0]
    return [timestamps, timestamps + gaps[1] - 1]


def relative_bias(total_len: int, *, rows: int | None, seed=0) -> RelativeBias:
    """float64 tables with gradients, short enough for both clamps to act; `rows` heads or one for all."""
    generator = torch.Generator().manual_seed(seed)
    position, time = (
        torch.randn(*([] if rows is None else [rows]), size, generator=generator, dtype=torch.float64)
        for size in (5, 40)
    )
    return RelativeBias(position.requires_grad_(), time.requires_grad_(), *times(total_len, seed))


class Cut(NamedTuple):
    """Whole samples as a cache and new tokens: what `hstu_attention_cached` takes, cut from a whole batch."""

    layout: SequenceLayout
    cache_layout: SequenceLayout
    is_cached: torch.Tensor  # bool [T], tokens of the whole batch

    def to(self, device) -> "Cut":
        return Cut(self.layout.to(device), self.cache_layout.to(device), self.is_cached.to(device))

    def new(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach()[~self.is_cached]

    def cached(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach()[self.is_cached]

    def bias(self, whole: RelativeBias) -> CachedRelativeBias:
        tables = (whole.position_table.detach(), whole.time_table.detach())
        times = (self.new(whole.timestamps), self.new(whole.next_timestamps))
        return RelativeBias(*tables, *times).with_cache(self.cached(whole.timestamps))

    def arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
        """The positional arguments of `hstu_attention_cached`, less the mask."""
        new = [self.new(tensor) for tensor in (q, k, v)]
        return (*new, self.layout, self.cached(k), self.cached(v), self.cache_layout)


def cut(batch: list[Sample], num_cached: list[int]) -> Cut:
    """Contextual tokens and the first `num_cached` events of each sample (at most all) are in the cache."""
    kept = [min(events, sample.uih) for sample, events in zip(batch, num_cached, strict=True)]
    contextual = batch[0].contextual if batch else 0
    is_cached = [
        position < contextual + events
        for sample, events in zip(batch, kept, strict=True)
        for position in range(sample.length)
    ]
    new = [Sample(0, sample.uih - events, sample.targets) for sample, events in zip(batch, kept, strict=True)]
    cached = [Sample(contextual, events, 0) for events in kept]
    return Cut(layout_of(new), layout_of(cached), torch.tensor(is_cached, dtype=torch.bool))
