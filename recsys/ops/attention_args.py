"""Checks the arguments of all attention ops, and returns the static facts by which an op chooses a
backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import RelativeBias
from recsys.ops.runtime.arguments import kind_of

MAX_SAMPLES = 65_535
"""The most samples that a launch of FlashAttention takes."""


@dataclass(frozen=True)
class AttentionFacts:
    """Facts of a call from which a backend decides whether it can run; no values of tensors.

    Attributes:
        histories_only: whether `fits_flash` holds and the tokens of each sample are of one kind; False for
            ops that do not ask.
        only_targets: whether all new tokens of a call with a cache are targets.
        num_units: approximate number of tiles of new rows times heads; 0 where it does not matter.
    """

    device: str
    dtype: torch.dtype
    num_heads: int
    qk_dim: int
    v_dim: int
    mask: AttentionMask
    has_bias: bool = False
    needs_grad: bool = False
    deterministic: bool = False
    histories_only: bool = False
    only_targets: bool = False
    num_units: int = 0


@lru_cache(maxsize=4096)
def _known_facts(*fields: Any) -> AttentionFacts:
    """Returns the facts of an earlier call with these fields: a lookup costs less than a new object."""
    return AttentionFacts(*fields)


def attention_facts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    bias: RelativeBias | None = None,
    deterministic: bool | None = None,
    *further: bool | int,
) -> AttentionFacts:
    """Returns the facts of one call. `deterministic=None` follows `torch.use_deterministic_algorithms`;
    `further` are the fields from `histories_only` on."""
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and (bias.position_table.requires_grad or bias.time_table.requires_grad))
    )
    make = AttentionFacts if torch.compiler.is_compiling() else _known_facts
    shape, has_bias = q.shape, bias is not None
    return make(
        q.device.type,
        q.dtype,
        shape[1],
        shape[2],
        v.shape[2],
        mask,
        has_bias,
        needs_grad,
        is_deterministic(deterministic),
        *further,
    )


def is_deterministic(setting: bool | None = None) -> bool:
    """Returns the setting, or that of `torch.use_deterministic_algorithms` for None."""
    return torch.are_deterministic_algorithms_enabled() if setting is None else setting


def scale_of(q: Tensor) -> float:
    """Returns `1 / sqrt(D)` for q [T, H, D]; in a traced graph it is a constant for the only width that the
    graph serves.

    `range` has no symbolic length. A number computed from a symbolic width would be compiled in as well, and
    PyTorch 2.11 to 2.15 would reuse that code from its cache on disk for other widths.
    """
    return len(range(q.shape[2])) ** -0.5


def check_attention(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask) -> None:
    """Checks ranks, shapes, dtypes and devices of q, k, v against each other and the layout.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is allowed.
    """
    if not torch.compiler.is_compiling() and _are_alike(q, k, v, layout, mask):
        return
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout, got {type(layout).__name__}")
    if not isinstance(mask, AttentionMask):
        raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating point tensor, got {kind_of(tensor)}")
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have shape [total_len, heads, dim], got {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {tensor.dtype}")
        if tensor.device != layout.device:
            raise ValueError(f"{name} is on {tensor.device}, the layout on {layout.device}")
        if tensor.shape[0] != layout.total_len:
            raise ValueError(f"{name} has {tensor.shape[0]} rows, the layout total_len = {layout.total_len}")
        if tensor.shape[1] != q.shape[1]:
            raise ValueError(f"{name} must have the heads of q, {q.shape[1]}, got {tensor.shape[1]}")
        if tensor.shape[1] == 0 or tensor.shape[2] == 0:
            raise ValueError(
                f"{name} must have at least one head and one dimension, got shape {tuple(tensor.shape)}"
            )
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have the head dimension of q, {q.shape[2]}, got {k.shape[2]}")


def fits_flash(layout: SequenceLayout) -> bool:
    """Returns whether FlashAttention can take as many samples, in an untraced call."""
    return not torch.compiler.is_compiling() and layout.batch_size <= MAX_SAMPLES


def check_cache(
    q: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    cache_k: Tensor,
    cache_v: Tensor,
    cache_layout: SequenceLayout,
) -> None:
    """Checks the cache against the new tokens, and what kinds of tokens the two layouts hold.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(cache_layout, SequenceLayout):
        raise TypeError(f"cache_layout must be a SequenceLayout, got {type(cache_layout).__name__}")
    if cache_layout.device != layout.device:
        raise ValueError(f"cache_layout is on {cache_layout.device}, layout on {layout.device}")
    if cache_layout.batch_size != layout.batch_size:
        raise ValueError(
            f"cache_layout has {cache_layout.batch_size} samples, layout {layout.batch_size}; "
            "each sample of layout continues the same one of cache_layout"
        )
    if cache_layout.total_targets != 0:
        raise ValueError(f"cache_layout must hold no targets, it has {cache_layout.total_targets}")
    if layout.num_contextual != 0:
        raise ValueError(
            f"layout must hold no contextual tokens, they are in the cache; num_contextual is "
            f"{layout.num_contextual}"
        )
    for name, tensor, like, like_name in (("cache_k", cache_k, q, "q"), ("cache_v", cache_v, v, "v")):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != like.dtype:
            raise TypeError(f"{name} must have the dtype of {like_name}, {like.dtype}, got {tensor.dtype}")
        if tensor.device != like.device:
            raise ValueError(f"{name} is on {tensor.device}, {like_name} on {like.device}")
        if tensor.dim() != 3 or tensor.shape[1:] != like.shape[1:]:
            wanted = f"[cached tokens, {like.shape[1]}, {like.shape[2]}]"
            raise ValueError(f"{name} must have shape {wanted} as {like_name}, got {tuple(tensor.shape)}")
        if tensor.shape[0] != cache_layout.total_len:
            raise ValueError(
                f"{name} has {tensor.shape[0]} rows, the cache_layout total_len = {cache_layout.total_len}"
            )


def _are_alike(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask) -> bool:
    """Returns True in the common case that q, k and v have one shape and nothing is wrong with them;
    quick."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        return False
    if not (isinstance(layout, SequenceLayout) and isinstance(mask, AttentionMask)):
        return False
    shape = q.shape
    return (
        len(shape) == 3
        and shape == k.shape == v.shape
        and shape[0] == layout.total_len
        and shape[1] > 0
        and shape[2] > 0
        and q.dtype == k.dtype == v.dtype
        and q.is_floating_point()
        and q.device == k.device == v.device == layout.device
    )


def check_bias(bias: RelativeBias, q: Tensor) -> None:
    """Checks a bias against the q whose scores it is added to.

    Raises:
        TypeError, ValueError: naming the field of the bias.
    """
    if not isinstance(bias, RelativeBias):
        raise TypeError(f"bias must be a RelativeBias or None, got {type(bias).__name__}")
    for name in ("position_table", "time_table", "timestamps", "next_timestamps"):
        tensor = getattr(bias, name)
        if tensor.device != q.device:
            raise ValueError(f"bias.{name} is on {tensor.device}, q on {q.device}")
        if name.endswith("table"):
            if tensor.dim() == 2 and tensor.shape[0] != q.shape[1]:
                raise ValueError(f"bias.{name} has {tensor.shape[0]} rows, q has {q.shape[1]} heads")
        elif tensor.shape[0] != q.shape[0]:
            raise ValueError(f"bias.{name} has {tensor.shape[0]} entries, q has {q.shape[0]} rows")
