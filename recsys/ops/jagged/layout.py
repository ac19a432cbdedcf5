"""Defines `SequenceLayout`: where each sample's tokens lie in a jagged tensor of `total_len` rows.

A sample is `[contextual | uih | targets]`, stored without padding (uih: user interaction history, oldest
first). The data loader builds one layout per batch, on the host; modules derive others from it and ops read
it. Every total that an op needs is an int that the layout already knows, so a forward pass never waits for
the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.ops.jagged.layout_facts import (
    CONTEXTUAL,
    KERNELS,
    TARGET,
    UIH,
    HostCopy,
    LayoutFacts,
    PaddedIndex,
    max_or_zero,
    offsets_from_lengths,
)
from recsys.ops.runtime import triton_support

__all__ = [
    "CONTEXTUAL",
    "TARGET",
    "UIH",
    "PaddedIndex",
    "Selection",
    "SequenceLayout",
    "offsets_from_lengths",
]

_Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps lengths and num_targets, both [B], to those of a derived layout, on any device."""


class Selection(NamedTuple):
    """Selected tokens: their layout, and the row of the source that each token comes from."""

    layout: SequenceLayout
    index: Tensor  # int64 [layout.total_len]


class SequenceLayout(LayoutFacts):
    """Lengths of the samples of a batch and everything that follows from them; immutable.

    `SequenceLayout(lengths, num_targets, num_contextual)` validates; `SequenceLayout.trusted(...)` does not,
    and is for traced graphs. Both hold the same facts; `B` is the number of samples, `T` the number of
    tokens.

    Attributes:
        lengths: int64 [B], number of tokens of each sample.
        offsets: int64 [B + 1], first row of each sample; `offsets[0] == 0`, `offsets[B] == total_len`.
        num_targets: int64 [B], number of target tokens at the end of each sample.
        num_contextual: number of contextual tokens at the start of every sample.
        total_len: number of rows of the jagged tensors that this layout describes.
        max_len: upper bound on the sample lengths; exact if the lengths were known on the host.
        total_targets: sum of `num_targets`.
        parts: the layouts from which `join` made this one; otherwise empty.
    """

    @classmethod
    def join(cls, parts: Sequence[SequenceLayout]) -> SequenceLayout:
        """Join all samples of the first part, then of the second, and so on, into one batch for a single
        kernel.

        Raises:
            ValueError: there are no parts, or their `num_contextual` differ.
        """
        contextual = {part.num_contextual for part in parts}
        if len(contextual) != 1:
            raise ValueError(f"parts must have one num_contextual, got {sorted(contextual) or 'no part'}")
        lengths = torch.cat([part.lengths for part in parts])
        joined = cls.trusted(
            lengths,
            offsets_from_lengths(lengths),
            torch.cat([part.num_targets for part in parts]),
            contextual.pop(),
            total_len=sum(part.total_len for part in parts),
            max_len=reduce(torch.sym_max, (part.max_len for part in parts)),
            total_targets=sum(part.total_targets for part in parts),
        )
        joined.parts = tuple(parts)
        hosts = [part._host for part in parts if part._host is not None]
        if len(hosts) == len(joined.parts):
            lengths, num_targets = zip(*hosts, strict=True)
            joined._host = HostCopy(torch.cat(lengths), torch.cat(num_targets))
        return joined

    def truncate(self, tail_len: int) -> Selection:
        """Keep the contextual tokens, the newest `tail_len` history tokens and all targets of every sample.

        The new sizes follow from the host copy of the lengths. A trusted layout has none and reads them off
        the tensor: one synchronization on a device, unbacked sizes in an exported graph. The sizes of all
        parts of a joined layout are read together and share one bound, because a compiler cannot decide which
        of two unbacked sizes is larger.

        Raises:
            ValueError: `tail_len` is negative.
        """
        if tail_len < 0:
            raise ValueError(f"tail_len must be >= 0, got {tail_len}")
        return self.fact(("truncate", tail_len), lambda: self._truncate(tail_len))

    def _truncate(self, tail_len: int) -> Selection:
        def kept(lengths: Tensor, num_targets: Tensor) -> tuple[Tensor, Tensor]:
            num_uih = lengths - num_targets - self.num_contextual
            return lengths - (num_uih - tail_len).clamp(min=0), num_targets

        parts = self.parts or (self,)
        totals, max_len = [None] * len(parts), None
        if any(part._host is None for part in parts):
            totals, max_len = _read_sizes([kept(part.lengths, part.num_targets)[0] for part in parts])
        remaining = iter(totals)

        def newest(part: SequenceLayout) -> SequenceLayout:
            return part._derive(kept, part.num_contextual, next(remaining), part.total_targets, max_len)

        layout = self._derive_each(newest)
        dropped, first = self.lengths - layout.lengths, torch.zeros_like(self.lengths)
        if triton_support.has_kernels(self.device):
            return Selection(layout, triton_support.load(KERNELS).source_rows(self, layout, first, dropped))
        index, behind = self._source_rows(layout, first), layout.positions() >= self.num_contextual
        return Selection(layout, index + torch.where(behind, layout._per_token(dropped), 0))

    def widen(self, tokens_per_event: int) -> SequenceLayout:
        """Return the layout of histories whose events become several tokens, after one contextual token.

        Raises:
            ValueError: the samples have contextual or target tokens.
        """
        if self.num_contextual or self.total_targets:
            raise ValueError(f"only histories can be widened, got {self}")
        return self._derive(
            lambda lengths, num_targets: (lengths * tokens_per_event + 1, num_targets),
            num_contextual=1,
            total_len=self.total_len * tokens_per_event + self.batch_size,
            total_targets=0,
            max_len=self.max_len * tokens_per_event + 1,
        )

    def evenly(self, tokens: int) -> SequenceLayout:
        """Return the layout of as many histories, all of `tokens` events."""
        return self._derive(
            lambda lengths, num_targets: (torch.full_like(lengths, tokens), torch.zeros_like(num_targets)),
            num_contextual=0,
            total_len=self.batch_size * tokens,
            total_targets=0,
            max_len=tokens,
        )

    def history_only(self) -> Selection:
        """Select the history tokens, as samples without contextual and target tokens."""
        first = self.num_contextual

        def history(part: SequenceLayout) -> SequenceLayout:
            return part._derive(
                lambda lengths, num_targets: (lengths - num_targets - first, torch.zeros_like(lengths)),
                num_contextual=0,
                total_len=part.total_len - part.total_targets - part.batch_size * first,
                total_targets=0,
            )

        return self._one_run(self._derive_each(history), torch.full_like(self.lengths, first))

    def without_targets(self) -> Selection:
        """Select the contextual and the history tokens."""

        def prefix(part: SequenceLayout) -> SequenceLayout:
            return part._derive(
                lambda lengths, num_targets: (lengths - num_targets, torch.zeros_like(lengths)),
                num_contextual=part.num_contextual,
                total_len=part.total_len - part.total_targets,
                total_targets=0,
            )

        return self._one_run(self._derive_each(prefix), torch.zeros_like(self.lengths))

    def targets_only(self) -> Selection:
        """Select the target tokens, as samples that consist of targets."""
        return self.fact("targets_only", self._targets_only)

    def _targets_only(self) -> Selection:
        def targets(part: SequenceLayout) -> SequenceLayout:
            total = part.total_targets
            return part._derive(lambda lengths, num_targets: (num_targets, num_targets), 0, total, total)

        return self._one_run(self._derive_each(targets), self.history_end)

    def targets_between(self, start: int, stop: int) -> Selection:
        """Select targets `start` to `stop - 1` of every sample, as far as they exist.

        Sizes are found as in `truncate`.
        """

        def kept(lengths: Tensor, num_targets: Tensor) -> tuple[Tensor, Tensor]:
            count = (num_targets - start).clamp(0, stop - start)
            return count, count

        def between(part: SequenceLayout) -> SequenceLayout:
            return part._derive(kept, num_contextual=0, total_len=None, total_targets=None)

        return self._one_run(self._derive_each(between), self.history_end + start)

    def select(self, samples: Sequence[int]) -> Selection:
        """Select samples in the given order, each as often as it is named; in a joined layout, from every
        part.

        Sizes are found as in `truncate`.

        Raises:
            IndexError: there is no such sample.
        """
        if self.parts:
            return self._of_parts(lambda part: part.select(samples))
        if not all(0 <= sample < self.batch_size for sample in samples):
            raise IndexError(f"samples must be in [0, {self.batch_size}), got {list(samples)}")
        host = torch.tensor(samples, dtype=torch.int64)
        place = host.to(self.device, non_blocking=True)

        def chosen(lengths: Tensor, num_targets: Tensor) -> tuple[Tensor, Tensor]:
            index = place if lengths.device == place.device else host
            return lengths.index_select(0, index), num_targets.index_select(0, index)

        layout = self._derive(chosen, self.num_contextual, total_len=None, total_targets=None)
        shift = self.offsets.index_select(0, place) - layout.offsets[:-1]
        return Selection(
            layout, torch.arange(layout.total_len, device=self.device) + layout._per_token(shift)
        )

    def assemble_index(self) -> Tensor:
        """Return int64 [T]: row of each token in `cat([all contextual rows, all uih rows, all target rows])`.

        Each of the three blocks is jagged by sample, in the order of the samples, just as `history_only` and
        `targets_only` select it.
        """
        if triton_support.has_kernels(self.device):
            return self._tokens().assemble_index

        def build() -> Tensor:
            token = self.disassemble_index()
            return torch.empty_like(token).scatter(0, token, torch.arange(self.total_len, device=self.device))

        return self.fact("assemble_index", build)

    def disassemble_index(self) -> Tensor:
        """Return int64 [T], the inverse of `assemble_index`: token of each contextual, then uih, then target
        row."""
        if triton_support.has_kernels(self.device):
            return self._tokens().disassemble_index

        def build() -> Tensor:
            contextual = torch.full_like(self.lengths, self.num_contextual)
            lengths = torch.cat([contextual, self.num_uih, self.num_targets])
            start = self.offsets[:-1]
            first = torch.cat([start, start + self.num_contextual, start + self.history_end])
            shift = first - (lengths.cumsum(0) - lengths)
            token = torch.arange(self.total_len, device=self.device)
            return token + torch.repeat_interleave(shift, lengths, output_size=self.total_len)

        return self.fact("disassemble_index", build)

    def _one_run(self, derived: SequenceLayout, first: Tensor) -> Selection:
        """Select the run of tokens of each sample that `derived` describes, from position `first` [B] on."""
        return Selection(derived, self._source_rows(derived, first))

    def _source_rows(self, derived: SequenceLayout, first: Tensor) -> Tensor:
        """Return the source row of each token of `derived`, which has one run per sample, from position
        `first` [B] on."""
        if triton_support.has_kernels(self.device):
            return triton_support.load(KERNELS).source_rows(self, derived, first)
        shift = self.offsets[:-1] + first - derived.offsets[:-1]
        return torch.arange(derived.total_len, device=self.device) + derived._per_token(shift)

    def _of_parts(self, select: Callable[[SequenceLayout], Selection]) -> Selection:
        """Select from all parts and join the selections."""
        selections = [select(part) for part in self.parts]
        before = accumulate((part.total_len for part in self.parts), initial=0)
        index = [selection.index + start for selection, start in zip(selections, before, strict=False)]
        return Selection(SequenceLayout.join([part.layout for part in selections]), torch.cat(index))

    def _derive_each(self, derive: Callable[[SequenceLayout], SequenceLayout]) -> SequenceLayout:
        """Derive a layout from each part and join them; from this layout, if it has no parts."""
        return SequenceLayout.join([derive(part) for part in self.parts]) if self.parts else derive(self)

    def _derive(
        self,
        rule: _Rule,
        num_contextual: int,
        total_len: int | None,
        total_targets: int | None,
        max_len: int | None = None,
    ) -> SequenceLayout:
        """Apply `rule(lengths, num_targets)` to the tensors and to the host copy.

        Args:
            total_len, total_targets: None if they depend on the lengths themselves.
            max_len: a bound that is known besides `total_len`; None for the bound of this layout.
        """
        lengths, num_targets = rule(self.lengths, self.num_targets)
        host = None if self._host is None else HostCopy(*rule(*self._host))
        if host is not None:
            max_len = max_or_zero(host.lengths)
            total_len = int(host.lengths.sum()) if total_len is None else total_len
        elif total_len is not None:
            max_len = self.max_len if max_len is None else max_len
        else:
            (total_len,), max_len = _read_sizes([lengths])
        if total_targets is None:
            total_targets = int((num_targets if host is None else host.num_targets).sum())
        derived = SequenceLayout.trusted(
            lengths,
            offsets_from_lengths(lengths),
            num_targets,
            num_contextual,
            total_len,
            max_len,
            total_targets,
        )
        derived._host = host
        return derived


def _read_sizes(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Read sums of lengths that only a device or a traced graph knows, and one bound for all of them, in one
    wait.

    The bound is the maximum, but at least 2: a compiler treats sizes 0 and 1 as special cases.
    """
    longest = torch.cat([*parts, parts[0].new_full((1,), 2)]).max()
    *totals, max_len = torch.stack([*(lengths.sum() for lengths in parts), longest]).cpu().unbind()
    bound = max_len.item()
    torch._check(bound >= 2)
    return [total.item() for total in totals], bound
