"""Defines `ChunkTable`: the tokens of a batch cut into chunks for the kernels of `linear_attention`.

The history of each sample is cut into chunks of `size` tokens, and then its targets; no chunk holds tokens of
two samples. Runs of chunks form segments, which kernels can process concurrently. All sizes that a launch
needs are bounds that follow from the sizes of tensors, so nothing waits for the device, and surplus rows of
the tables are empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.jagged.layout import SequenceLayout


class ChunkTable(NamedTuple):
    """Chunks of a layout, sample by sample: first those of the history, then those of the targets."""

    chunks: Tensor
    """int64 [upper bound on chunks, 4]: sample, first row, number of tokens, 1 if they are targets. Surplus
    rows have no tokens."""
    segments: Tensor
    """int64 [upper bound on segments, 4]: sample, first chunk, chunks of history, chunks of targets behind
    them, which only the last segment of a sample has. Surplus rows have sample -1."""
    segment_offsets: Tensor
    """int64 [B + 1], the first segment of each sample; every sample has at least one."""


def chunk_table(
    lengths: Tensor, offsets: Tensor, num_targets: Tensor, total_len: int, size: int, per_segment: int
) -> ChunkTable:
    """Cuts samples into chunks and segments on the device of the tensors.

    Args:
        lengths, num_targets: int64 [B]; offsets: int64 [B + 1]; see `SequenceLayout`.
        total_len: number of tokens of all samples.
        size: tokens per chunk.
        per_segment: history chunks per segment; 0 makes each sample one segment.
    """
    batch = lengths.shape[0]
    history = lengths - num_targets
    of_history, of_targets = _parts(history, size), _parts(num_targets, size)
    chunk_ends = (of_history + of_targets).cumsum(0)
    chunk_offsets = _offsets(chunk_ends)
    bound = total_len // size + 2 * batch
    number = torch.arange(bound, device=lengths.device)
    sample = torch.searchsorted(chunk_ends, number, right=True).clamp(max=batch - 1)
    place = number - chunk_offsets[sample]
    behind = place - of_history[sample]
    is_target = behind >= 0
    begin = torch.where(is_target, history[sample] + behind * size, place * size)
    end = torch.where(is_target, lengths[sample], history[sample])
    count = torch.where(number < chunk_offsets[-1], (end - begin).clamp(0, size), 0)
    chunks = torch.stack([sample, offsets[sample] + begin, count, is_target.long()], 1)

    per_sample = _parts(of_history, per_segment).clamp(min=1) if per_segment else torch.ones_like(lengths)
    segment_ends = per_sample.cumsum(0)
    segment_offsets = _offsets(segment_ends)
    bound = batch + (total_len // (size * per_segment) if per_segment else 0)
    number = torch.arange(bound, device=lengths.device)
    sample = torch.searchsorted(segment_ends, number, right=True)
    exists = sample < batch
    sample = sample.clamp(max=batch - 1)
    skipped = (number - segment_offsets[sample]) * per_segment
    left = of_history[sample] - skipped
    is_last = number + 1 == segment_offsets[sample + 1]
    segments = torch.stack(
        [
            torch.where(exists, sample, -1),
            chunk_offsets[sample] + skipped,
            torch.where(is_last, left, per_segment),
            torch.where(is_last, of_targets[sample], 0),
        ],
        1,
    )
    return ChunkTable(chunks, segments, segment_offsets)


def chunk_table_of(layout: SequenceLayout, size: int, per_segment: int) -> ChunkTable:
    """Returns the table of a layout; the layout caches it for the other layers of a model."""

    def build() -> ChunkTable:
        return chunk_table(
            layout.lengths, layout.offsets, layout.num_targets, layout.total_len, size, per_segment
        )

    return layout.memo(("chunk_table", size, per_segment), build)


def _offsets(ends: Tensor) -> Tensor:
    """Returns where each run begins, then the end of the last one. A search needs the ends themselves: for a
    GPU, Inductor cannot compile a search in a slice of a tensor that it computes."""
    return torch.cat([ends.new_zeros(1), ends])


def _parts(count: Tensor, size: int) -> Tensor:
    return (count + size - 1) // size
