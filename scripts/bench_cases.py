"""Defines the shapes that `bench_ops.py` measures, and counts their FLOP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.jagged.mask import key_intervals

OP, CACHED_OP = "hstu_attention", "hstu_attention_cached"
CAUSAL = AttentionMask()


@dataclass(frozen=True)
class Case:
    """One shape. `shape` is its name in records."""

    shape: str
    lengths: Tensor  # int64 [B], on the host
    dim: int
    heads: int = 4
    num_targets: int = 0
    num_contextual: int = 0
    mask: AttentionMask = CAUSAL
    biased: bool = False
    deterministic: bool = False
    num_cached: Tensor | None = None
    """Number of tokens of each sample that are in a cache, int64 [B]; None without a cache."""

    @property
    def op(self) -> str:
        return OP if self.num_cached is None else CACHED_OP

    @property
    def directions(self) -> tuple[str, ...]:
        return ("fwd", "bwd") if self.num_cached is None else ("fwd",)

    def layout(self) -> SequenceLayout:
        """Returns the layout of whole samples on the host, with `num_targets` targets each."""
        return SequenceLayout(
            self.lengths, torch.full_like(self.lengths, self.num_targets), self.num_contextual
        )


def cases(quick: bool = False) -> list[Case]:
    """Returns the published shapes, then those with bias, windows, targets and determinism."""
    equal = [
        (128, 1024, 128),
        (32, 4096, 128),
        (8, 16384, 128),
        (64, 4096, 64),
        (32, 2048, 256),
        (1024, 256, 64),
    ]
    cases = [
        Case(f"B{batch} L{length} D{dim}", torch.full((batch,), length), dim) for batch, length, dim in equal
    ]
    # These draws have the published amount of work, so that times can be compared.
    uniform = torch.randint(1, 4097, (64,), generator=torch.Generator().manual_seed(46))
    pareto = torch.rand(512, generator=torch.Generator().manual_seed(250))
    pareto = (16 / pareto.pow(1 / 0.93)).clamp(max=2048).to(torch.int64)
    cases.append(Case("B64 uniform 1..4096 D128", uniform, 128))
    cases.append(Case("B512 Pareto 16..2048 D128", pareto, 128))
    base = Case("B32 L2048 D64", torch.full((32,), 2048), 64)
    cases += [base, replace(base, shape="B32 L2048 D64 bias", biased=True)]
    long = Case("B8 L16384 D128 window 512 prefix 64", torch.full((8,), 16384), 128)
    cases.append(replace(long, mask=AttentionMask(window=512, prefix=64)))
    targets = replace(base, num_targets=256, num_contextual=6)
    cases.append(replace(targets, shape="B32 L2048 D64 C6 targets 256"))
    groups = replace(targets, mask=AttentionMask(window=256, target_window=True, target_group_size=4))
    cases.append(replace(groups, shape="B32 L2048 D64 C6 targets 256 groups 4 window 256"))
    cases += [replace(case, shape=f"{case.shape} deterministic", deterministic=True) for case in cases[:8]]
    cases += cached_cases(uniform)
    return cases[:2] + cases[9:11] if quick else cases


def cached_cases(uniform: Tensor) -> list[Case]:
    """Returns cases of candidates on a cached history: 256, other numbers, ragged, biased, semi-local."""

    def case(shape: str, num_cached: Tensor, targets: int, dim: int = 128, **options: Any) -> Case:
        return Case(shape, num_cached + targets, dim, num_targets=targets, num_cached=num_cached, **options)

    long = torch.full((32,), 4096)
    near = AttentionMask(window=512, prefix=64, target_window=True)
    return [
        case("B32 cached 4096 new 256 D128", long, 256),
        case("B1 cached 4096 new 256 D128", long[:1], 256),
        case("B32 cached 4096 new 2048 D128", long, 2048),
        case("B32 cached 4096 new 1 D128", long, 1),
        case("B64 cached uniform 1..4096 new 256 D128", uniform, 256),
        case("B32 cached 4096 new 256 D64", long, 256, 64),
        case("B32 cached 4096 new 256 D64 bias", long, 256, 64, biased=True),
        case("B32 cached 4096 new 256 D128 window 512 prefix 64", long, 256, mask=near),
    ]


def tiny_cases() -> list[Case]:
    """Return cases for a machine without a GPU."""
    lengths = torch.tensor([5, 17, 40])
    bias = Case("tiny bias", lengths, 16, heads=2, num_targets=3, num_contextual=2, biased=True)
    cached = replace(bias, shape="tiny cached bias", num_cached=torch.tensor([2, 9, 37]))
    return [Case("tiny", lengths, 16, heads=2), replace(bias, mask=AttentionMask(window=4, prefix=2)), cached]


def useful_flop(case: Case) -> float:
    """Return the FLOP of the forward pass: two products over the visible pairs."""
    first = torch.zeros_like(case.lengths) if case.num_cached is None else case.num_cached
    samples, counts = torch.stack([case.lengths, first], dim=1).unique(dim=0, return_counts=True)
    pairs = 0
    for (length, computed), count in zip(samples.tolist(), counts.tolist(), strict=True):
        sample_layout = SequenceLayout(
            torch.tensor([length]), torch.tensor([case.num_targets]), case.num_contextual
        )
        seen = key_intervals(case.mask, sample_layout)
        pairs += count * int((seen.end - seen.start)[computed:].sum())
    return 2.0 * 2.0 * case.dim * case.heads * pairs
