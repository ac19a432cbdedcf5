"""Splits jagged tensors into padded chunks of samples, for the reference backends.

In eager mode the samples are sorted by size and cut into chunks, so that there is little padding and the
scores of a chunk stay small; the grouping changes a sample's numbers only by rounding. A GPU gets few large
chunks, because launches cost more than padding there. A traced graph takes one chunk of all samples: a single
path for all batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.jagged.reference import gather_rows, invert


class Limits(NamedTuple):
    """Limits for grouping samples on a device."""

    max_scores: int  # heads x samples x rows x keys in one chunk, unless a single sample has more
    wasted_scores: int  # padding that costs as much as the calls of a new chunk


CPU_LIMITS = Limits(max_scores=2**22, wasted_scores=2**15)
GPU_LIMITS = Limits(max_scores=2**26, wasted_scores=2**24)
"""A chunk costs the host about 0.2 ms of launches; in that time a GPU passes over 2**24 scores several
times."""


@dataclass(frozen=True)
class Chunk:
    """A group of samples, padded to the longest of them."""

    num_samples: int  # b below
    max_len: int
    history_end: Tensor  # int64 [b], position of the first target; [1] if one mask serves all samples


@dataclass(frozen=True)
class PaddedChunks:
    """All samples of a layout in chunks; converts tensors [T, ...] to chunks and back."""

    chunks: Sequence[Chunk]
    index: Tensor  # int64, row in [T] of each padded row, chunk after chunk; -1 for padding
    inverse: Tensor  # int64 [T], the inverse of `index`

    def split(self, values: Tensor) -> list[Tensor]:
        """Convert [T, ...] to one [b, max_len, ...] per chunk, with zeros as padding."""
        return self._by_chunk(gather_rows(values, self.index, self.inverse))

    def are_tokens(self) -> list[Tensor]:
        """Return bool [b, max_len] for each chunk: false for padding."""
        return self._by_chunk(self.index >= 0)

    def _by_chunk(self, padded: Tensor) -> list[Tensor]:
        sizes = [chunk.num_samples * chunk.max_len for chunk in self.chunks]
        parts = padded.split(sizes) if len(sizes) > 1 else [padded]
        return [
            part.unflatten(0, (chunk.num_samples, chunk.max_len))
            for part, chunk in zip(parts, self.chunks, strict=True)
        ]

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo `split`, dropping the padding."""
        padded = [part.flatten(0, 1) for part in parts]
        rows = torch.cat(padded) if len(padded) > 1 else padded[0]
        return gather_rows(rows, self.inverse, self.index, complete=True)


def padded_chunks(layout: SequenceLayout, mask: AttentionMask, num_heads: int) -> PaddedChunks:
    """Return the chunks of `layout` for an op that builds `num_heads` scores for each pair of tokens."""
    lengths = layout.host_lengths
    if lengths is None or torch.compiler.is_compiling():
        return _one_chunk(layout)
    order = lengths.argsort(descending=True, stable=True)
    ends = _chunk_ends([(length, length) for length in lengths[order].tolist()], num_heads, _limits(layout))
    # Without targets the rows of all samples follow the same rule, unless contextual rows read a whole
    # history.
    alike = layout.total_targets == 0 and not (layout.num_contextual and mask.contextual_reads_history)
    return _cut(layout, lengths, order, ends, alike)


def paired_chunks(
    layout: SequenceLayout, cache_layout: SequenceLayout, num_heads: int, *, new_are_keys: bool = True
) -> tuple[PaddedChunks, PaddedChunks]:
    """Return chunks of the same samples in both layouts.

    The tokens of `layout` attend to those of `cache_layout` and, if `new_are_keys`, to each other.
    """
    new, cached = layout.host_lengths, cache_layout.host_lengths
    if new is None or cached is None or torch.compiler.is_compiling():
        return _one_chunk(layout), _one_chunk(cache_layout)
    keys = new + cached if new_are_keys else cached
    order = (new * keys).argsort(descending=True, stable=True)
    sizes = torch.stack([new, keys], dim=1)[order].tolist()
    ends = _chunk_ends(sizes, num_heads, _limits(layout))
    return _cut(layout, new, order, ends), _cut(cache_layout, cached, order, ends)


def _cut(
    layout: SequenceLayout, lengths: Tensor, order: Tensor, ends: Sequence[int], alike: bool = False
) -> PaddedChunks:
    """Cut the samples, taken in `order`, at `ends`. `lengths` and `order` are on the host."""
    longest = [int(part.max()) if len(part) else 0 for part in lengths[order].tensor_split(ends[:-1])]
    order = order.to(layout.device, non_blocking=True)
    sorted_lengths, sorted_ends = layout.lengths[order], layout.history_end[order]
    starts = layout.offsets[:-1][order]
    chunks, indices, begin = [], [], 0
    for end, max_len in zip(ends, longest, strict=True):
        position = torch.arange(max_len, device=layout.device)
        rows = starts[begin:end, None] + position
        indices.append(torch.where(position < sorted_lengths[begin:end, None], rows, -1).flatten())
        history_end = starts.new_full((1,), max_len) if alike else sorted_ends[begin:end]
        chunks.append(Chunk(end - begin, max_len, history_end))
        begin = end
    index = torch.cat(indices)
    return PaddedChunks(chunks, index, invert(index, layout.total_len))


def _one_chunk(layout: SequenceLayout) -> PaddedChunks:
    inverse = layout.sample_ids() * layout.max_len + layout.positions()
    chunk = Chunk(layout.batch_size, layout.max_len, layout.history_end)
    return PaddedChunks([chunk], layout.padded_index().index.flatten(), inverse)


def _limits(layout: SequenceLayout) -> Limits:
    return CPU_LIMITS if layout.device.type == "cpu" else GPU_LIMITS


def _chunk_ends(sizes: Sequence[Sequence[int]], num_heads: int, limits: Limits) -> list[int]:
    """Return the ends of the runs of samples that share a chunk, given (rows, keys) of each sample's scores.

    The samples with the most scores come first; empty ones, at the end, join the last chunk.
    """
    ends: list[int] = []
    begin, most_rows, most_keys, used = 0, 0, 0, 0
    for sample, (rows, keys) in enumerate(sizes):
        most_rows, most_keys, used = max(most_rows, rows), max(most_keys, keys), used + rows * keys
        padded = (sample - begin + 1) * most_rows * most_keys
        too_many = num_heads * padded > limits.max_scores
        if sample > begin and (too_many or num_heads * (padded - used) > limits.wasted_scores):
            ends.append(sample)
            begin, most_rows, most_keys, used = sample, rows, keys, rows * keys
    return [*ends, len(sizes)]
