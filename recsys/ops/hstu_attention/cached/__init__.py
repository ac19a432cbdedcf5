"""Defines `hstu_attention_cached`: `hstu_attention` for new tokens, with the keys and values of earlier
tokens cached."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.ops.attention_args import (
    AttentionFacts,
    attention_facts,
    check_attention,
    check_bias,
    check_cache,
    scale_of,
)
from recsys.ops.hstu_attention import supports_sm90 as attention_supports_sm90
from recsys.ops.hstu_attention import supports_triton
from recsys.ops.hstu_attention.problem import CachedProblem
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import CachedRelativeBias
from recsys.ops.runtime.arguments import check_number
from recsys.ops.runtime.dispatch import Op, Support

__all__ = ["OP", "hstu_attention_cached", "supports_triton"]

_CAUSAL = AttentionMask()

TILE = 128
"""Rows per unit of work, for `num_units`."""

MOST_UNITS = 1024
"""Cap on `num_units`: more units make no difference, and few distinct values mean few facts to store."""


def hstu_attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    cache_k: Tensor,
    cache_v: Tensor,
    cache_layout: SequenceLayout,
    mask: AttentionMask = _CAUSAL,
    *,
    alpha: float | None = None,
    scale_len: float,
    bias: CachedRelativeBias | None = None,
    backend: str = "auto",
) -> Tensor:
    """Computes the new rows of `hstu_attention` over `[contextual | cached uih | new uih | targets]`.

    Each sample of `layout` continues the same sample of `cache_layout`: `out[i] = sum_j silu(alpha <q_i, k_j>
    + bias[i, j]) v_j / scale_len` over the keys `j` that the new token `i` sees, cached ones and new ones, as
    `mask` defines for the whole sample. Cached tokens are keys only.

    For one layer this is exact with any cache. A stack of layers caches keys and values of *computed* tokens,
    so its cache is right only as long as those tokens would be computed the same:

    - Targets change no other token: scoring candidates is exact for every mask, in microbatches of any size
      that hold whole target groups.
    - New events are exact where `mask.history_can_grow(num_contextual)`. Where contextual tokens read the
      history, their rows change from the first layer on, and those of the cached events, which see them, from
      the second: recomputing the contextual rows is exact for two layers and no more. Prefill again.
    - With time bias the row of the last cached event depends on the time of the event after it. If that event
      was unknown when the cache was built, cut the last event off the cache and pass it among the new tokens.

    Args:
        q: [T, H, D] floating point, of the new tokens; `T == layout.total_len`.
        k: [T, H, D], dtype and device of q.
        v: [T, H, V]; V may differ from D.
        layout: the new tokens of each sample: uih (oldest first, following the cached uih), then targets. No
            contextual tokens; samples may be empty.
        cache_k: [T_cache, H, D], `T_cache == cache_layout.total_len`.
        cache_v: [T_cache, H, V].
        cache_layout: the cached tokens of each sample: contextual tokens and uih, no targets; same
            `batch_size` as `layout`.
        mask: who sees whom within the whole sample.
        alpha: None for `1 / sqrt(D)`; an explicit 0.0 means 0.0.
        scale_len: the constant of the whole model, as in `hstu_attention`.
        bias: relative position and time bias, with the times of the cached tokens.
        backend: "auto" takes the first usable one; a named one runs or raises.

    Returns:
        [T, H, V]. Not differentiable.

    Raises:
        TypeError, ValueError: naming the argument. RuntimeError if gradients are requested.

    Source: M-FALCON in Zhai et al., Actions Speak Louder than Words (HSTU), arXiv 2402.17152.
    """
    check_attention(q, k, v, layout, mask)
    alpha = scale_of(q) if alpha is None else alpha
    problem = CachedProblem(layout, mask, alpha, scale_len, bias, cache_layout=cache_layout)
    check_cache(q, v, layout, cache_k, cache_v, cache_layout)
    check_number("scale_len", scale_len, positive=True)
    check_number("alpha", alpha)
    if bias is not None:
        _check_cached_bias(bias, q, cache_k)
    further = _facts_of_new_tokens(layout, q.shape[1])
    facts = attention_facts(q, k, v, mask, bias, problem.deterministic, False, *further)
    if facts.needs_grad or (torch.is_grad_enabled() and (cache_k.requires_grad or cache_v.requires_grad)):
        raise RuntimeError(
            "hstu_attention_cached computes no gradients; call it under torch.no_grad(), or train with "
            "hstu_attention on whole samples"
        )
    chosen = OP.select(facts, backend)
    return chosen.run(q, k, v, cache_k, cache_v, problem)


def _facts_of_new_tokens(layout: SequenceLayout, num_heads: int) -> tuple[bool, int]:
    """Returns `only_targets` and `num_units`. A graph serves many sizes and knows none."""
    if torch.compiler.is_compiling():
        return False, 0
    tiles = max(layout.total_len // TILE, min(layout.batch_size, layout.total_len))
    return layout.total_targets == layout.total_len, min(tiles * num_heads, MOST_UNITS)


def _check_cached_bias(bias: CachedRelativeBias, q: Tensor, cache_k: Tensor) -> None:
    if not isinstance(bias, CachedRelativeBias):
        raise TypeError(
            f"bias must be a CachedRelativeBias (see RelativeBias.with_cache) or None, got "
            f"{type(bias).__name__}"
        )
    check_bias(bias, q)
    if bias.cache_timestamps.device != q.device:
        raise ValueError(f"bias.cache_timestamps is on {bias.cache_timestamps.device}, q on {q.device}")
    if bias.cache_timestamps.shape[0] != cache_k.shape[0]:
        raise ValueError(
            f"bias.cache_timestamps has {bias.cache_timestamps.shape[0]} entries, cache_k has "
            f"{cache_k.shape[0]} rows"
        )


WIDTHS = (64, 128)
"""Head widths, in columns, for which `hopper` has sizes."""

ENOUGH = 96
"""Tiles times heads from which on a call keeps a GPU busy; with fewer, the Triton backend, which sums in
parts, is as fast."""


def supports_sm90(facts: AttentionFacts) -> Support:
    """Supports what the Hopper backend for whole samples does, if all new tokens are targets without a
    window."""
    able = attention_supports_sm90(facts)
    if not able.ok:
        return able
    missing = ""
    if facts.qk_dim not in WIDTHS:
        missing = f"it takes heads of {WIDTHS}, not {facts.qk_dim}"
    elif torch.compiler.is_compiling():
        missing = "a graph does not know of which kind new tokens are"
    elif not facts.only_targets:
        missing = "it takes new tokens that are all targets, here there is history among them"
    elif facts.mask.target_window:
        missing = "it has no window of targets"
    if missing:
        return able._replace(ok=False, reason=missing, auto=False)
    return able._replace(auto=able.auto and facts.num_units >= ENOUGH)


OP = Op("hstu_attention_cached", __name__, backends=("sm90", "triton", "reference"))
