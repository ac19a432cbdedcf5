"""Copies batches of any size into buffers of a few sizes, whose rest belongs to filler rows.

A recorded CUDA graph reads the same memory and the same sizes in each replay. `PaddedInputs` are such memory:
`fill` copies a batch to the front of the buffers, and `batch` reads them as a batch with additional rows. The
additional rows take up all events, candidates and ids that the buffers have beyond those of the batch. Their
weight is 0, and rows do not see each other, so they change no loss and no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch, LayoutRule
from recsys.ops import SequenceLayout, offsets_from_lengths

ROWS, EVENTS, CANDIDATES = "rows", "events", "candidates"
"""Names of the counts that most tensors of a batch have as their length."""

_BY_ROW = ("request_time", "sample_weight", "group")
_BY_EVENT = ("uih_timestamps", "uih_actions", "uih_watch_time")


@dataclass(frozen=True)
class Sizes:
    """The sizes of padded inputs.

    Attributes:
        num_rows: rows of the batch. num_fillers: rows behind them.
        counts: by name, the length of tensors: ROWS, EVENTS, CANDIDATES, and the columns with a number of ids
            of their own. Sorted by name.
        max_len: bound on the tokens of a row.
    """

    num_rows: int
    num_fillers: int
    counts: tuple[tuple[str, int], ...]
    max_len: int


class Columns:
    """Names, for each column of a config's batches, the count that is its length.

    Args:
        pipeline: resolved.
        rule: how rows become sequences.

    Attributes:
        ids: by column, the name of the count of its ids.
        entries: by column, the name of the count of its numbers, or of its lists of ids.
        fixed: names of the counts that are the same in every batch and have no fillers.
    """

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule) -> None:
        sides = {pb.USER: ROWS, pb.HISTORY: EVENTS, pb.CANDIDATE: CANDIDATES}
        shared = features.shared_columns(pipeline)
        columns = [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
        self.rule = rule
        self.entries = {c.name: sides.get(c.side, c.name) for c in columns} | {name: name for name in shared}
        multi_valued = {c.name for c in columns if c.multi_valued}
        self.ids = {
            name: f"ids of {name}" if name in multi_valued else entries
            for name, entries in self.entries.items()
        }
        self.fixed = {name for name, entries in self.entries.items() if entries == name}
        self.fixed |= {self.ids[name] for name in self.fixed}

    def sizes(self, batch: Batch) -> Sizes:
        """Returns the sizes of the buffers for a batch: a few for batches of similar sizes."""
        rows, rule = batch.layout.batch_size, self.rule
        exact = {EVENTS: batch.uih_timestamps.shape[0], CANDIDATES: batch.candidate_timestamps.shape[0]}
        counts = {name: _rounded(count) for name, count in exact.items()}
        max_len = -(-batch.layout.max_len // 64) * 64
        # A filler row is at most half as long as the longest row.
        tokens = rule.tokens_per_event * _step(exact[EVENTS]) + rule.targets * _step(exact[CANDIDATES])
        fillers = max(4, -(-tokens // max(1, max_len // 2 - rule.num_contextual)))
        counts[ROWS] = rows + fillers
        for name, count in zip(batch.ids.keys(), batch.ids.length_per_key(), strict=True):
            ids, entries = self.ids[name], self.entries[name]
            if ids in self.fixed:
                counts[ids] = count
            elif ids not in counts:  # whole ids for each entry, so that there are few sizes
                counts[ids] = (count // counts[entries] + 1) * counts[entries]
        for name, entries in (batch.value_counts | batch.numbers).items():
            if name in self.fixed:
                counts[name] = entries.shape[0]
        return Sizes(rows, fillers, tuple(sorted(counts.items())), max_len)


class PaddedInputs:
    """Buffers for batches of the same rounded sizes, on the device of the first batch.

    Args:
        columns: of the config.
        sizes: those of `batch`.
        batch: decides types and names.
        vectors: the looked-up vectors of the batch by column, [n, width].

    Attributes:
        vectors: by column, a buffer for its vectors; requires gradients.
    """

    def __init__(self, columns: Columns, sizes: Sizes, batch: Batch, vectors: Mapping[str, Tensor]) -> None:
        self._columns, self._sizes = columns, sizes
        self._counts = dict(sizes.counts)
        self._inputs = {
            name: tensor.new_zeros(self._counts[count], *tensor.shape[1:])
            for name, (tensor, count) in self._tensors(batch).items()
        }
        self._lengths = batch.ids.lengths().new_zeros(len(batch.ids.keys()), self._counts[ROWS])
        self._keys = batch.ids.keys()
        self._num_ids = [self._counts[columns.ids[name]] for name in self._keys]
        self._totals = torch.tensor(self._num_ids, device=self._lengths.device)
        self._num_contextual = batch.layout.num_contextual
        self.vectors = {
            name: tensor.new_zeros(self._counts[columns.ids[name]], tensor.shape[1]).requires_grad_()
            for name, tensor in vectors.items()
        }

    def fill(self, batch: Batch, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """Copies a batch into the buffers.

        Returns:
            The vectors by column, padded with zeros, with gradients that reach those of `vectors`.
        """
        given = {name: tensor for name, (tensor, _) in self._tensors(batch).items()}
        buffers = [self._inputs[name] for name in given]
        _copy_to_front(buffers, list(given.values()))
        lengths = batch.ids.lengths().view(len(self._keys), -1)
        self._lengths[:, : lengths.shape[1]].copy_(lengths)
        # Detached, so that no gradient of this step is recorded for the buffers, which graphs differentiate.
        padded = [self.vectors[name].detach() for name in vectors]
        return list(_Fill.apply(padded, *vectors.values())) if padded else []

    def batch(self) -> Batch:
        """Returns the buffers as a batch, fillers included. Nothing waits for the device."""
        of_group: dict[str, dict[str, Tensor]] = {}
        for (group, name), tensor in self._inputs.items():
            of_group.setdefault(group, {})[name] = tensor
        events = self._padded(of_group["lengths"]["uih_lengths"], EVENTS)
        candidates = self._padded(of_group["lengths"]["num_candidates"], CANDIDATES)
        counts = {
            name: self._with_rest(name, lengths) for name, lengths in of_group.get("value_counts", {}).items()
        }
        return Batch(
            layout=self._layout(events, candidates),
            uih_lengths=events,
            num_candidates=candidates,
            ids=self._ids(of_group["ids"]),
            value_counts=counts,
            numbers=of_group.get("numbers", {}),
            labels=of_group.get("labels", {}),
            weights=of_group.get("weights", {}),
            **of_group["fields"],
        )

    def _tensors(self, batch: Batch) -> dict[tuple[str, str], tuple[Tensor, str]]:
        """Returns, by group and name, each tensor of a batch and the name of the count of its entries."""
        columns = self._columns
        ids = zip(batch.ids.keys(), batch.ids.values().split(batch.ids.length_per_key()), strict=True)
        fields = [(name, ROWS) for name in _BY_ROW] + [(name, EVENTS) for name in _BY_EVENT]
        named = [("fields", name, getattr(batch, name), count) for name, count in fields]
        named.append(("fields", "candidate_timestamps", batch.candidate_timestamps, CANDIDATES))
        named += [("lengths", name, getattr(batch, name), ROWS) for name in ("uih_lengths", "num_candidates")]
        named += [("ids", name, values, columns.ids[name]) for name, values in ids]
        named += [("labels", name, values, CANDIDATES) for name, values in batch.labels.items()]
        for group, tensors in (("value_counts", batch.value_counts), ("numbers", batch.numbers)):
            named += [(group, name, values, columns.entries[name]) for name, values in tensors.items()]
        sides = {pb.USER: ROWS, pb.HISTORY: EVENTS, pb.CANDIDATE: CANDIDATES}
        for name, values in batch.weights.items():
            named.append(("weights", name, values, sides[features.side_of(name)]))
        return {(group, name): (values, count) for group, name, values, count in named}

    def _padded(self, lengths: Tensor, count: str) -> Tensor:
        """Returns the lengths of all rows, [rows]; fillers divide evenly what the batch's rows leave."""
        rows, fillers = self._sizes.num_rows, self._sizes.num_fillers
        rest = self._counts[count] - lengths.sum()
        ends = rest * torch.arange(fillers + 1, device=lengths.device) // fillers
        return torch.cat([lengths[:rows], ends.diff()])

    def _with_rest(self, name: str, lengths: Tensor) -> Tensor:
        """Returns the number of ids of each entry; the last entry, a filler, has all that is left."""
        if name in self._columns.fixed:
            return lengths
        rest = self._counts[self._columns.ids[name]] - lengths.sum()
        return torch.cat([lengths[:-1], rest[None]])

    def _ids(self, values: dict[str, Tensor]) -> KeyedJaggedTensor:
        rest = self._totals - self._lengths.sum(1)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=torch.cat([values[name] for name in self._keys]),
            lengths=torch.cat([self._lengths[:, :-1], rest[:, None]], dim=1).flatten(),
            stride=self._counts[ROWS],
            length_per_key=self._num_ids,
        )

    def _layout(self, events: Tensor, candidates: Tensor) -> SequenceLayout:
        rule, counts = self._columns.rule, self._counts
        targets = candidates if rule.targets else torch.zeros_like(candidates)
        total_targets = counts[CANDIDATES] if rule.targets else 0
        lengths = self._num_contextual + rule.tokens_per_event * events + targets
        fixed = self._num_contextual * counts[ROWS] + rule.tokens_per_event * counts[EVENTS]
        return SequenceLayout.trusted(
            lengths,
            offsets_from_lengths(lengths),
            targets,
            self._num_contextual,
            total_len=fixed + total_targets,
            max_len=self._sizes.max_len,
            total_targets=total_targets,
        )


class _Fill(torch.autograd.Function):
    """Copies vectors [n, width] to the front of buffers [m, width]; a gradient is that of the front."""

    @staticmethod
    def forward(ctx, buffers: list[Tensor], *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = [len(tensor) for tensor in vectors]
        _copy_to_front(buffers, list(vectors))
        return tuple(buffers)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad[:count] for grad, count in zip(grads, ctx.counts, strict=True))


def _copy_to_front(buffers: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies each tensor to the front of its buffer and fills the rest with zeros, all in a few launches."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for buffer, tensor in zip(buffers, tensors, strict=True):
        targets, sources = by_type.setdefault(tensor.dtype, ([], []))
        targets.append(buffer)
        sources.append(tensor)
    with torch.no_grad():
        for targets, sources in by_type.values():
            # Zeros everywhere cost the device little, and views of every rest would cost the host much.
            torch._foreach_zero_(targets)
            torch._foreach_copy_([t[: len(s)] for t, s in zip(targets, sources, strict=True)], sources)


def _step(count: int) -> int:
    """Returns the distance of rounded sizes near `count`: at most a quarter of it, or as many as cost a GPU
    next to nothing."""
    return max(512, 1 << max(0, count.bit_length() - 3))


def _rounded(count: int) -> int:
    """Rounds up to one of a few sizes, at least to `count` + 1."""
    step = _step(count)
    return (count // step + 1) * step
