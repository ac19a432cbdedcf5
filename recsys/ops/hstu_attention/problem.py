"""Defines `Problem` and `CachedProblem`: everything about one attention call except q, k and v.

The public functions build a problem and backends take it; layers that need more than the public signature
build one themselves. Library ops of PyTorch take flat arguments only: `flattened` and `rebuilt` convert
between the two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.attention_args import is_deterministic
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import CachedRelativeBias, RelativeBias
from recsys.ops.runtime.gradient_buffer import GradientBuffer


@dataclass(eq=False)  # Treat it as immutable: freezing it would cost several microseconds per call.
class Problem:
    """One call of `hstu_attention`, apart from q, k and v.

    Attributes:
        layout: lengths and kinds of the tokens of each sample.
        mask: who sees whom within a sample.
        alpha: factor of the scores.
        scale_len: divisor of the outputs.
        bias: relative position and time bias of the scores.
        deterministic: whether gradients must be bitwise repeatable.
        tail: number of newest history rows of each sample whose results are read; contextual tokens and
            targets are always read. All other rows must have a q of zeros, and their results are
            arbitrary. None: all rows are read.
            shared: intermediate results that forward and backward both use, keyed by the backend.
        shared: intermediate results that forward and backward both use, by a key of the backend.
    """

    layout: SequenceLayout
    mask: AttentionMask
    alpha: float
    scale_len: float
    bias: RelativeBias | None = None
    deterministic: bool = field(default_factory=is_deterministic, kw_only=True)
    grad_buffer: GradientBuffer | None = field(default=None, kw_only=True)
    tail: int | None = field(default=None, kw_only=True)
    shared: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, kw_only=True)

    @property
    def num_contextual(self) -> int:
        """Number of contextual tokens at the start of each sample."""
        return self.layout.num_contextual

    @property
    def tables(self) -> tuple[Tensor | None, Tensor | None]:
        """The position table and the time table of the bias; None, None without a bias."""
        return (None, None) if self.bias is None else (self.bias.position_table, self.bias.time_table)

    def with_grad_buffer(self, grad_buffer: GradientBuffer) -> Problem:
        """Returns a copy whose gradients go to `grad_buffer`; `dataclasses.replace` takes several times as
        long."""
        return Problem(
            self.layout,
            self.mask,
            self.alpha,
            self.scale_len,
            self.bias,
            deterministic=self.deterministic,
            grad_buffer=grad_buffer,
            tail=self.tail,
        )

    def gradient_memory(self, *tensors: Tensor) -> list[Tensor]:
        """Returns uninitialized memory for the gradients of `tensors`; rows in the grad buffer are not
        contiguous."""
        if self.grad_buffer is not None:
            return [self.grad_buffer.place(tensor) for tensor in tensors]
        return [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]


@dataclass(eq=False)
class CachedProblem(Problem):
    """One call of `hstu_attention_cached`, apart from q, k, v and the cached keys and values.

    Attributes:
        layout: the new tokens of each sample.
        bias: relative bias that also holds the timestamps of the cached tokens.
        cache_layout: the cached tokens of each sample.
    """

    bias: CachedRelativeBias | None
    cache_layout: SequenceLayout = field(kw_only=True)

    @property
    def num_contextual(self) -> int:
        """Number of contextual tokens at the start of each sample; they are part of the cache."""
        return self.cache_layout.num_contextual


class Gradients(NamedTuple):
    """Gradients of q, k and v, and of the bias tables if they were requested."""

    q: Tensor
    k: Tensor
    v: Tensor
    position_table: Tensor | None
    time_table: Tensor | None


NUM_FLAT_TENSORS = 7
"""Number of leading values of `flattened` that are tensors, or None in place of a tensor."""

FLAT_TABLES = 3
"""Index of the position table in the result of `flattened`; the time table follows it."""


def flattened(problem: Problem) -> tuple[Any, ...]:
    """Returns the parameters of `rebuilt` after `total_len`, in order. Omits the gradient buffer, `tail` and
    `shared`, which graphs do not use."""
    layout, mask, bias = problem.layout, problem.mask, problem.bias
    times = (None, None) if bias is None else (bias.timestamps, bias.next_timestamps)
    return (
        layout.lengths,
        layout.offsets,
        layout.num_targets,
        *problem.tables,
        *times,
        layout.num_contextual,
        mask.window,
        mask.prefix,
        mask.target_window,
        mask.target_group_size,
        mask.contextual_reads_history,
        problem.alpha,
        problem.scale_len,
        problem.deterministic,
    )


def rebuilt(
    total_len: int,
    lengths: Tensor,
    offsets: Tensor,
    num_targets: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    timestamps: Tensor | None,
    next_timestamps: Tensor | None,
    num_contextual: int,
    window: int | None,
    prefix: int,
    target_window: bool,
    target_group_size: int,
    contextual_reads_history: bool,
    alpha: float,
    scale_len: float,
    deterministic: bool,
) -> Problem:
    """Rebuilds a problem from flat arguments. `total_len` also bounds the longest sample and the number of
    targets."""
    layout = SequenceLayout.trusted(
        lengths, offsets, num_targets, num_contextual, total_len, total_len, total_len
    )
    mask = AttentionMask(window, prefix, target_window, target_group_size, contextual_reads_history)
    bias = None
    if position_table is not None and time_table is not None:
        if timestamps is None or next_timestamps is None:
            raise ValueError("bias tables without timestamps and next_timestamps")
        bias = RelativeBias(position_table, time_table, timestamps, next_timestamps)
    return Problem(layout, mask, alpha, scale_len, bias, deterministic=deterministic)


def flat_signature(*tensors: str, returns: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates `f(*tensors, *flat)` with the signature from which PyTorch infers the schema of a library op.

    Args:
        tensors: names of the parameters that precede those of the problem.
        returns: annotation of the result.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(name, kind, annotation=Tensor) for name in tensors]
    flat = list(inspect.signature(rebuilt, eval_str=True).parameters.values())[1:]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__signature__ = inspect.Signature([*names, *flat], return_annotation=returns)  # type: ignore[attr-defined]
        return function

    return decorate
