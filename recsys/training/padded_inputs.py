"""Copies batches of any size into buffers of a few sizes, whose rest belongs to filler rows.

A recorded CUDA graph reads the same memory and the same sizes in each replay. `PaddedInputs` are such memory:
`fill` copies a batch to the front of the buffers, and `batch` reads them as a batch with additional rows. The
additional rows take up all events, candidates and ids that the buffers have beyond those of the batch. Their
weight is 0, and rows do not see each other, so they change no loss and no gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch, LayoutRule
from recsys.ops import SequenceLayout, offsets_from_lengths
from recsys.scoring.static_buffers import StaticBuffers

ROWS, EVENTS, CANDIDATES, SEEN = "rows", "events", "candidates", "seen"
"""Names of the counts that most tensors of a batch have as their length."""

_SIDES = {pb.USER: ROWS, pb.HISTORY: EVENTS, pb.CANDIDATE: CANDIDATES}

_IDS, _LENGTHS = ("ids", "values"), ("ids", "lengths")
_VALUES, _VALUE_LENGTHS, _VALUE_OFFSETS = (("looked up", x) for x in ("values", "lengths", "offsets"))
"""Names of buffers: the ids and the lengths of their lists; and the ids, without fillers, that are looked up
outside of the graph. The other buffers have the names of fields of a batch, and the key if the field is a
dict."""

_BY_ROW = ("request_time", "sample_weight", "group", "uih_lengths", "num_candidates")
_BY_EVENT = ("uih_timestamps", "uih_actions", "uih_watch_time")
_SEEN_LENGTHS = ("seen_lengths", None)
"""The lengths of `Batch.seen_layout`, by their name in the reader's arrays."""

_Name = tuple[str, str | None]


@dataclass(frozen=True)
class Sizes:
    """The sizes of padded inputs.

    Attributes:
        num_rows: rows of the batch. num_fillers: rows behind them.
        counts: by name, the length of tensors: ROWS, EVENTS, CANDIDATES, and the columns with a number of ids
            of their own. Sorted by name.
        max_len: bound on the tokens of a row. max_seen: bound on its seen items.
    """

    num_rows: int
    num_fillers: int
    counts: tuple[tuple[str, int], ...]
    max_len: int
    max_seen: int = 0


class Columns:
    """Names, for each column of a config's batches, the count that is its length.

    Args:
        pipeline: resolved.
        rule: how rows become sequences.
        evaluates: whether batches have seen items, which only evaluation reads.

    Attributes:
        ids: by column, the name of the count of its ids.
        entries: by column, the name of the count of its numbers, or of its lists of ids.
        fixed: names of the counts that are the same in every batch and have no fillers.
    """

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, *, evaluates: bool = False) -> None:
        shared = features.shared_columns(pipeline)
        columns = [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
        self.rule, self.evaluates = rule, evaluates
        self.entries = {c.name: _SIDES.get(c.side, c.name) for c in columns} | {name: name for name in shared}
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
        seen, max_seen = batch.seen_layout, 0
        counts |= {SEEN: 0} if self.evaluates else {}
        if self.evaluates and seen.total_len:
            counts[SEEN] = _rounded(seen.total_len)
            # The lengths of whole histories differ much: powers of four are few.
            bits = (max(seen.max_len, -(-_step(seen.total_len) // fillers)) - 1).bit_length()
            max_seen = 1 << bits + bits % 2
        return Sizes(rows, fillers, tuple(sorted(counts.items())), max_len, max_seen)


class PaddedInputs:
    """Buffers on a device for batches of the same rounded sizes.

    Args:
        columns: of the config.
        sizes: those of `batch`.
        batch: on the host; decides types and names.
        device: where the buffers are.
        groups: for each collection of tables that is looked up outside of the graph, column -> width.

    Attributes:
        rows: for each of these collections, a float32 buffer for the vectors of its columns without fillers,
            one column after the other, [n, width]; requires gradients. The last row stays zero.
    """

    def __init__(
        self,
        columns: Columns,
        sizes: Sizes,
        batch: Batch,
        device: torch.device,
        groups: Sequence[Mapping[str, int]] = (),
    ) -> None:
        self._columns, self._sizes = columns, sizes
        self._counts = dict(sizes.counts)
        self._keys = batch.ids.keys()
        self._num_ids = [self._counts[columns.ids[name]] for name in self._keys]
        self._starts = list(accumulate(self._num_ids, initial=0))[:-1]
        self._num_contextual = batch.layout.num_contextual
        # The places of the columns of each group among the keys, and the padded number of their ids.
        self._groups = [[self._keys.index(name) for name in group] for group in groups]
        self._group_sizes = [sum(self._num_ids[place] for place in group) for group in self._groups]
        self._lookup_order = [place for group in self._groups for place in group]
        forms = {}
        for name, count in _counts_by_name(columns, batch).items():
            tensor = batch.seen_layout.lengths if name == _SEEN_LENGTHS else _of(batch, name)
            forms[name] = ((self._counts[count], *tensor.shape[1:]), tensor.dtype)
        self._names = list(forms)
        self._buffers = StaticBuffers(forms | self._forms_of_ids(batch), device)
        self._totals = torch.tensor(self._num_ids, device=device)
        self._spreads = [
            _SpreadPlaces(group, [self._num_ids[place] for place in group], device) for group in self._groups
        ]
        widths = [next(iter(group.values())) for group in groups]
        self.rows = [
            torch.zeros(size + 1, width, device=device, requires_grad=True)
            for size, width in zip(self._group_sizes, widths, strict=True)
        ]

    def _forms_of_ids(self, batch: Batch) -> dict[_Name, tuple[tuple[int, ...], torch.dtype]]:
        ids, lengths = batch.ids.values().dtype, batch.ids.lengths().dtype
        forms = {_IDS: ((sum(self._num_ids),), ids)}
        forms[_LENGTHS] = ((len(self._keys), self._counts[ROWS]), lengths)
        if self._groups:
            lists = len(self._lookup_order) * self._sizes.num_rows
            forms[_VALUES] = ((sum(self._group_sizes),), ids)
            forms[_VALUE_LENGTHS] = ((lists,), lengths)
            forms[_VALUE_OFFSETS] = ((lists + 1,), torch.int64)
        return forms

    def fill(self, batch: Batch) -> None:
        """Copies a batch that a reader made into the buffers, in one transfer."""
        # Its arrays, since each step from a tensor to its array costs as much as copying it.
        arrays = batch.arrays
        ends = list(accumulate(batch.ids.length_per_key(), initial=0))
        pieces = [arrays.id_values[start:end] for start, end in pairwise(ends)]
        # Only what lies behind a batch is zeroed, since that is little.
        with self._buffers.filling(cleared=False) as buffers:
            for name in self._names:
                _put(_of(arrays, name), buffers[name].reshape(-1))
            lengths = arrays.id_lengths.reshape(len(self._keys), -1)
            buffers[_LENGTHS][:, : lengths.shape[1]] = lengths
            for start, size, ids in zip(self._starts, self._num_ids, pieces, strict=True):
                _put(ids, buffers[_IDS][start : start + size])
            if self._groups:
                # The ids that are looked up outside of the graph.
                ordered = [pieces[place] for place in self._lookup_order]
                np.concatenate(ordered, out=buffers[_VALUES][: sum(map(len, ordered))])
                lists = buffers[_VALUE_LENGTHS].reshape(len(ordered), -1)
                np.take(lengths, self._lookup_order, axis=0, out=lists)
                np.cumsum(lists, out=buffers[_VALUE_OFFSETS][1:])

    def unpadded_ids(self, batch: Batch) -> KeyedJaggedTensor:
        """Returns the ids that `fill` copied, without fillers, for the lookup outside of the graph."""
        counts, tensors = batch.ids.length_per_key(), self._buffers.tensors
        per_key = [counts[place] for place in self._lookup_order]
        return KeyedJaggedTensor(
            keys=[self._keys[place] for place in self._lookup_order],
            values=tensors[_VALUES][: sum(per_key)],
            lengths=tensors[_VALUE_LENGTHS],
            offsets=tensors[_VALUE_OFFSETS],
            stride=self._sizes.num_rows,
            length_per_key=per_key,
        )

    def place(self, looked_up: Sequence[Tensor]) -> list[Tensor]:
        """Copies the vectors of each collection, in the order of `rows`, to the front of its buffer.

        Returns:
            The buffers, whose gradients reach the given vectors.
        """
        # Detached, so that no gradient of this step is recorded for the buffers, which graphs differentiate.
        pairs = zip(self.rows, looked_up, strict=True)
        return [_Place.apply(buffer.detach(), vectors) for buffer, vectors in pairs]

    def vectors(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns column -> its vectors in the padded batch, [n, width]; those of fillers are zero.

        Args:
            rows: the buffers, as `rows` or `place` return them.
        """
        vectors, counts = {}, self._buffers.tensors[_LENGTHS].sum(1)
        for group, places, buffer in zip(self._groups, self._spreads, rows, strict=True):
            spread = _Spread.apply(buffer, *places(counts))
            parts = spread.split([self._num_ids[place] for place in group])
            vectors |= {self._keys[place]: part for place, part in zip(group, parts, strict=True)}
        return vectors

    def batch(self) -> Batch:
        """Returns the buffers as a batch, fillers included. Nothing waits for the device."""
        tensors: dict[str, Any] = {"value_counts": {}, "numbers": {}, "labels": {}, "weights": {}}
        for field, key in self._names:
            tensor = self._buffers.tensors[field, key]
            if key is None:
                tensors[field] = tensor
            else:
                tensors[field][key] = self._with_rest(key, tensor) if field == "value_counts" else tensor
        tensors["uih_lengths"] = self._padded(tensors["uih_lengths"], EVENTS)
        tensors["num_candidates"] = self._padded(tensors["num_candidates"], CANDIDATES)
        if self._columns.evaluates:
            seen, total, longest = tensors.pop("seen_lengths"), self._counts[SEEN], self._sizes.max_seen
            lengths = self._padded(seen, SEEN)
            tensors["seen_layout"] = SequenceLayout.trusted(
                lengths, offsets_from_lengths(lengths), torch.zeros_like(lengths), 0, total, longest, 0
            )
        layout = self._layout(tensors["uih_lengths"], tensors["num_candidates"])
        return Batch(layout=layout, ids=self._ids(), **tensors)

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

    def _ids(self) -> KeyedJaggedTensor:
        values, lengths = self._buffers.tensors[_IDS], self._buffers.tensors[_LENGTHS]
        rest = self._totals - lengths.sum(1)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            lengths=torch.cat([lengths[:, :-1], rest[:, None]], dim=1).flatten(),
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


class _Place(torch.autograd.Function):
    """Copies vectors [n, width] to the front of a buffer [m, width]; a gradient is that of the front."""

    @staticmethod
    def forward(ctx, buffer: Tensor, vectors: Tensor) -> Tensor:
        ctx.count = len(vectors)
        buffer[: len(vectors)].copy_(vectors)
        return buffer

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad[: ctx.count]


class _SpreadPlaces:
    """Finds where the vectors of a collection's columns lie in the padded batch.

    Args:
        group: the places of the columns among all keys.
        sizes: for each of the columns, the padded number of its ids.
        device: where places are computed, so that the host need not compute and send them.
    """

    def __init__(self, group: Sequence[int], sizes: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(sizes)
        starts = counts.cumsum(0) - counts
        self._group = torch.tensor(group).to(device)
        self._padded = torch.arange(sum(sizes)).to(device)
        self._column = torch.repeat_interleave(counts).to(device)
        self._in_column = self._padded - starts.repeat_interleave(counts).to(device)

    def __call__(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for each padded vector its row among those without fillers, or the last row of the buffer
        for fillers; and for each of these rows its padded place.

        Args:
            counts: int64 [keys], the number of ids of all columns.
        """
        of_group = counts.index_select(0, self._group)
        starts = of_group.cumsum(0) - of_group
        rows = starts.index_select(0, self._column) + self._in_column
        is_filler = self._in_column >= of_group.index_select(0, self._column)
        sources = rows.masked_fill(is_filler, len(rows))
        targets = rows.new_zeros(len(rows) + 1).scatter(0, sources, self._padded)
        return sources, targets[:-1]


class _Spread(torch.autograd.Function):
    """Returns rows[sources], given the place of each row in the result; unlike the general case, its backward
    pass adds nothing up. Rows without a place get any gradient."""

    @staticmethod
    def forward(ctx, rows: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(targets)
        return rows.index_select(0, sources)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (targets,) = ctx.saved_tensors
        # The last row of the buffer is the vector of fillers.
        return torch.cat([grad.index_select(0, targets), torch.zeros_like(grad[:1])]), None, None


def _counts_by_name(columns: Columns, batch: Batch) -> dict[_Name, str]:
    """Returns, for each tensor of a batch but layout and ids, the name of the count that is its length."""
    counts: dict[_Name, str] = {(name, None): ROWS for name in _BY_ROW}
    counts |= {(name, None): EVENTS for name in _BY_EVENT}
    counts |= {("labels", task): CANDIDATES for task in batch.labels}
    counts["candidate_timestamps", None] = CANDIDATES
    if columns.evaluates:
        counts |= {("seen", None): SEEN, _SEEN_LENGTHS: ROWS, ("repeated", None): CANDIDATES}
    for field in ("value_counts", "numbers"):
        counts |= {(field, name): columns.entries[name] for name in getattr(batch, field)}
    return counts | {("weights", name): _SIDES[features.side_of(name)] for name in batch.weights}


def _of(batch: Any, name: _Name) -> Any:
    """Returns a tensor of a `Batch`, or an array of a `BatchArrays`."""
    field, key = name
    return getattr(batch, field) if key is None else getattr(batch, field)[key]


def _put(array: np.ndarray, buffer: np.ndarray) -> None:
    buffer[: len(array)] = array
    buffer[len(array) :] = 0


def _step(count: int) -> int:
    """Returns the distance of rounded sizes near `count`: at most a quarter of it, or as many as cost a GPU
    next to nothing."""
    return max(512, 1 << max(0, count.bit_length() - 3))


def _rounded(count: int) -> int:
    """Rounds up to one of a few sizes, at least to `count` + 1."""
    step = _step(count)
    return (count // step + 1) * step
