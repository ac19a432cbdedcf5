"""Defines `Problem` and `CachedProblem`: everything about one attention call except q, k and v.

The public functions build a problem and backends take it; layers that need more than the public signature
build one themselves. Library ops of PyTorch take flat arguments only: `flattened` makes a `FlatProblem`, and
`FlatProblem.rebuilt` turns it back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.ops.attention_args import is_deterministic
from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.relative_bias import CachedRelativeBias, RelativeBias
from recsys.ops.runtime.autograd import GradientBuffer


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
    position_table: Tensor | None = None
    time_table: Tensor | None = None


class FlatProblem(NamedTuple):
    """A problem as library ops take it: tensors first, then numbers. Graphs use neither a gradient buffer nor
    `tail` and `shared`."""

    lengths: Tensor
    offsets: Tensor
    num_targets: Tensor
    position_table: Tensor | None
    time_table: Tensor | None
    timestamps: Tensor | None
    next_timestamps: Tensor | None
    num_contextual: int
    window: int | None
    prefix: int
    target_window: bool
    target_group_size: int
    contextual_reads_history: bool
    alpha: float
    scale_len: float
    deterministic: bool

    def rebuilt(self, total_len: int) -> Problem:
        """Returns the problem; `total_len` also bounds the longest sample and the number of targets."""
        layout = SequenceLayout.trusted(*self[:3], self.num_contextual, total_len, total_len, total_len)
        mask = AttentionMask(*mask_fields(self))
        bias = None
        if self.position_table is not None and self.time_table is not None:
            if self.timestamps is None or self.next_timestamps is None:
                raise ValueError("bias tables without timestamps and next_timestamps")
            bias = RelativeBias(self.position_table, self.time_table, self.timestamps, self.next_timestamps)
        return Problem(layout, mask, self.alpha, self.scale_len, bias, deterministic=self.deterministic)


NUM_FLAT_TENSORS = 7
"""Number of leading fields of `FlatProblem` that are tensors, or None in place of a tensor."""

FLAT_TABLES = 3
"""Index of the position table in `FlatProblem`; the time table follows it."""


def flattened(problem: Problem) -> FlatProblem:
    """Returns the problem as library ops take it."""
    layout, mask, bias = problem.layout, problem.mask, problem.bias
    times = (None, None) if bias is None else (bias.timestamps, bias.next_timestamps)
    return FlatProblem(
        layout.lengths,
        layout.offsets,
        layout.num_targets,
        *problem.tables,
        *times,
        layout.num_contextual,
        *mask_fields(mask),
        problem.alpha,
        problem.scale_len,
        problem.deterministic,
    )


def mask_fields(mask: Any) -> tuple[int | None, int, bool, int, bool]:
    """Returns the fields of an `AttentionMask`, in order, from the mask or from a flat problem."""
    return (
        mask.window,
        mask.prefix,
        mask.target_window,
        mask.target_group_size,
        mask.contextual_reads_history,
    )
