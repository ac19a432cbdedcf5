"""The facts of a call from which a backend of `hstu_attention_cached` decides whether it can run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from recsys.ops.attention_args import AttentionFacts
from recsys.ops.jagged.layout import SequenceLayout

TILE = 128
"""Rows per unit of work."""

MOST_UNITS = 1024
"""More units make no difference, and few different numbers mean few facts to keep."""


@dataclass(frozen=True)
class CachedFacts(AttentionFacts):
    """The facts of the attention and of the new tokens.

    Attributes:
        only_targets: whether all new tokens are targets.
        num_units: about how many tiles of rows there are, times heads; at most `MOST_UNITS`.
    """

    only_targets: bool = False
    num_units: int = 0


def cached_facts(facts: AttentionFacts, layout: SequenceLayout) -> CachedFacts:
    """The facts of one call; `layout` is that of the new tokens. A graph is for many sizes and knows none."""
    if torch.compiler.is_compiling():
        return _extended(facts, False, 0)
    tiles = max(layout.total_len // TILE, min(layout.batch_size, layout.total_len))
    units = min(tiles * facts.num_heads, MOST_UNITS)
    return _known_facts(facts, layout.total_targets == layout.total_len, units)


@lru_cache(maxsize=1024)
def _known_facts(facts: AttentionFacts, only_targets: bool, num_units: int) -> CachedFacts:
    return _extended(facts, only_targets, num_units)


def _extended(facts: AttentionFacts, only_targets: bool, num_units: int) -> CachedFacts:
    # Field by field: a compiler of PyTorch 2.11 knows no dictionary of a frozen object.
    return CachedFacts(
        facts.device,
        facts.dtype,
        facts.num_heads,
        facts.qk_dim,
        facts.v_dim,
        facts.mask,
        facts.has_bias,
        facts.needs_grad,
        facts.deterministic,
        only_targets,
        num_units,
    )
