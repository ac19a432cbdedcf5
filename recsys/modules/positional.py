"""`PositionalEncoder`: adds learned vectors for a token's position and age."""

import math

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.cache import NotExtendableError
from recsys.modules.prefix import Prefix
from recsys.ops import SequenceLayout, bucket_embedding
from recsys.ops.runtime import triton_support


class PositionalEncoder(nn.Module):
    """Computes x * sqrt(E) + position[p] + time[b] for each token.

    In a sample with C contextual tokens, the position p of a contextual token is its index, 0 to C - 1. With
    origin END, all targets have position C, and history counts backward from there, so its newest token has C
    + 1. With origin START, history continues from C on, and all targets share the position after its newest
    token. Positions count tokens, so the two tokens of an interleaved event have consecutive positions.
    Positions past the table share its last row.

    The time bucket is `b = clamp(floor(f(age / unit)), 0, K - 1)`, where age is the request time minus the
    token's time in seconds, and f is the square root or the logarithm. Contextual tokens share row K.

    Args:
        config: tables and scale.
        embedding_dim: E.
    """

    def __init__(self, config: pb.PositionalEncoder, *, embedding_dim: int):
        super().__init__()
        self.scale = math.sqrt(embedding_dim)
        self.from_start = config.origin == pb.PositionalEncoder.START
        self.position = _table(config.num_positions, embedding_dim)
        self.num_time_buckets = config.num_time_buckets
        self.time = _table(config.num_time_buckets + 1, embedding_dim) if config.num_time_buckets else None
        self.logarithmic = config.time_scale == pb.PositionalEncoder.LOG
        self.time_unit = config.time_unit

    def forward(
        self,
        values: Tensor,
        layout: SequenceLayout,
        timestamps: Tensor,
        request_times: Tensor,
        behind: Prefix | None = None,
    ) -> Tensor:
        """Adds position and age to tokens.

        Args:
            values: [T, E].
            layout: layout of the tokens.
            timestamps: int64 [T], seconds.
            request_times: int64 [T], seconds; the time of each token's request.
            behind: the contextual and history tokens that precede these tokens, if they were encoded
                separately.

        Returns:
            [T, E].
        """
        tables = [self.position.weight, *([] if self.time is None else [self.time.weight])]
        by_kernel = behind is None and triton_support.has_kernels(values.device)
        if by_kernel and (self.time_unit.is_integer() and self.time_unit < 2**31):
            buckets = self._buckets_by_kernel(layout, timestamps, request_times)
        elif behind is not None and timestamps is request_times and _only_targets(layout):
            buckets = self._buckets_of_targets(layout, behind)
        else:
            buckets = [self.positions(layout, behind)]
            if self.time is not None:
                buckets.append(self.time_buckets(layout, request_times - timestamps))
        return bucket_embedding(values, tables, buckets, scale=self.scale)

    def require_extendable(self) -> None:
        """Checks that a token keeps its position and age when more events are added.

        Raises:
            NotExtendableError: names the setting that prevents it.
        """
        instead = "encode the whole history"
        if not self.from_start:
            raise NotExtendableError(
                "events cannot be appended with positional.origin: END, which counts tokens from the newest "
                f"event: {instead}, or train with START"
            )
        if self.time is not None:
            raise NotExtendableError(
                "events cannot be appended with positional.num_time_buckets > 0: the cached ages of older "
                f"events belong to an earlier request; {instead}"
            )

    def _buckets_by_kernel(
        self, layout: SequenceLayout, timestamps: Tensor, request_times: Tensor
    ) -> list[Tensor]:
        """Computes `positions` and `time_buckets` in one kernel."""
        ops, scale = triton_support.load("recsys.modules.token_kernels"), None
        if self.time is not None:
            scale = ops.TimeScale(self.num_time_buckets, int(self.time_unit), self.logarithmic)
        rows = self.position.num_embeddings
        return ops.buckets_of(
            layout, timestamps, request_times, rows, from_start=self.from_start, scale=scale
        )

    def _buckets_of_targets(self, layout: SequenceLayout, behind: Prefix) -> list[Tensor]:
        """Computes `positions` and `time_buckets` of targets alone.

        The age of a target is 0, and with origin END all targets have the same position.
        """
        zeros = torch.zeros(layout.total_len, dtype=torch.int64, device=layout.device)
        last = self.position.num_embeddings - 1
        if self.from_start:
            position = behind.lengths.flatten().clamp(max=last).index_select(0, layout.sample_ids())
        else:
            position = zeros + min(behind.num_contextual, last)
        return [position] if self.time is None else [position, zeros]

    def positions(self, layout: SequenceLayout, behind: Prefix | None = None) -> Tensor:
        """Returns int64 [T], rows of the position table."""
        index, history_end, num_contextual = layout.positions(), layout.history_end, layout.num_contextual
        sample = layout.sample_ids()
        if behind is not None:
            before = behind.lengths.flatten()
            index = index + before.index_select(0, sample)
            history_end, num_contextual = history_end + before, behind.num_contextual
        history_end = history_end.index_select(0, sample)
        position = torch.minimum(index, history_end)
        if not self.from_start:
            backward = num_contextual + history_end - position
            position = torch.where(index < num_contextual, index, backward)
        return position.clamp(max=self.position.num_embeddings - 1)

    def time_buckets(self, layout: SequenceLayout, ages: Tensor) -> Tensor:
        """Returns int64 [T], rows of the time table, from ages in seconds (int64)."""
        units = ages.to(torch.float64) / self.time_unit
        bucket = units.clamp(min=1).log() if self.logarithmic else units.clamp(min=0).sqrt()
        bucket = bucket.to(torch.int64).clamp(max=self.num_time_buckets - 1)
        return torch.where(layout.positions() < layout.num_contextual, self.num_time_buckets, bucket)


def _only_targets(layout: SequenceLayout) -> bool:
    """Returns whether a layout has targets only; False in a compiler, where sizes are symbolic."""
    return not torch.compiler.is_compiling() and layout.total_targets == layout.total_len


def _table(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    # Token embeddings start at std 0.02 and are scaled by sqrt(E); the tables start in the same range.
    nn.init.normal_(table.weight, std=width**-0.5)
    return table
