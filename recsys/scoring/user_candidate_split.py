"""Splits batches by side: users with their histories, candidates alone, or events alone.

Scoring with a cache looks up and encodes one side at a time. A batch of one side has the same rows, but the
other sides are empty.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.models.columns import keep_columns
from recsys.ops import Selection, SequenceLayout


class UserCandidateSplit:
    """Splits the batches of a resolved pipeline by side."""

    def __init__(self, pipeline: pb.Pipeline):
        self.columns = features.columns(pipeline)

    def users(self, batch: Batch) -> Batch:
        """Returns the batch with users and events only, with contextual and history tokens."""
        side = self._side(batch, (pb.USER, pb.HISTORY), SequenceLayout.without_targets)
        return replace(side, **_no_candidates(batch))

    def candidates(self, batch: Batch) -> Batch:
        """Returns the batch with candidates only, with target tokens."""
        side = self._side(batch, (pb.CANDIDATE,), SequenceLayout.targets_only)
        return replace(side, **_no_events(batch))

    def events(self, batch: Batch) -> Batch:
        """Returns the batch with events only, with history tokens."""
        side = self._side(batch, (pb.HISTORY,), SequenceLayout.history_only)
        return replace(side, **_no_candidates(batch))

    def candidate_range(self, batch: Batch, start: int, counts: Sequence[int]) -> Batch:
        """Returns consecutive candidates of a batch as separate rows, without users and events.

        Args:
            batch: a batch on the host, with candidates in the order of its rows.
            start: index of the first candidate, counted over all rows.
            counts: number of candidates of each new row.
        """
        stop, lengths = start + sum(counts), torch.tensor(counts, dtype=torch.int64)
        names = {column.name for column in self.columns if column.side == pb.CANDIDATE}
        layout = SequenceLayout(lengths, lengths)
        channels = batch.channel_layout and SequenceLayout.join([layout] * len(batch.channel_layout.parts))
        value_counts = {
            name: values[start:stop] if name in names else values[:0]
            for name, values in batch.value_counts.items()
        }
        none = torch.zeros_like(lengths)
        return replace(
            batch,
            layout=layout,
            channel_layout=channels,
            channel_events={name: events[:0] for name, events in batch.channel_events.items()},
            channel_lengths=dict.fromkeys(batch.channel_lengths, none),
            num_candidates=lengths,
            candidate_timestamps=batch.candidate_timestamps[start:stop],
            ids=_range_of_ids(batch, names, start, lengths),
            value_counts=value_counts,
            numbers={
                name: values[start:stop] if name in names else values[:0]
                for name, values in batch.numbers.items()
            },
            request_time=none,
            uih_lengths=none,
            uih_timestamps=batch.uih_timestamps[:0],
            uih_actions=batch.uih_actions[:0],
            uih_watch_time=batch.uih_watch_time[:0],
            labels={name: labels[start:stop] for name, labels in batch.labels.items()},
            weights={},
            sample_weight=torch.ones_like(none, dtype=batch.sample_weight.dtype),
            group=none,
        )

    def _side(
        self, batch: Batch, sides: Collection[int], select: Callable[[SequenceLayout], Selection]
    ) -> Batch:
        kept = {column.name for column in self.columns if column.side in sides}
        return replace(
            keep_columns(batch, kept),
            layout=select(batch.layout).layout,
            channel_layout=batch.channel_layout and select(batch.channel_layout).layout,
        )


def _range_of_ids(batch: Batch, names: Collection[str], start: int, lengths: Tensor) -> KeyedJaggedTensor:
    """Returns the ids of consecutive candidates; columns other than `names` are empty."""
    values, row_lengths, ends = [], [], torch.cumsum(lengths, 0)
    stop = start + int(lengths.sum())
    for name in batch.ids.keys():
        ids = batch.ids[name].values()
        if name not in names:
            values.append(ids[:0])
            row_lengths.append(torch.zeros_like(lengths))
        elif name in batch.value_counts:
            counts = batch.value_counts[name]
            first, total = int(counts[:start].sum()), int(counts[start:stop].sum())
            values.append(ids[first : first + total])
            sums = torch.cat([counts.new_zeros(1), torch.cumsum(counts[start:stop], 0)])
            row_lengths.append(sums[ends] - sums[ends - lengths])
        else:
            values.append(ids[start:stop])
            row_lengths.append(lengths)
    return KeyedJaggedTensor(
        keys=batch.ids.keys(),
        values=torch.cat(values),
        lengths=torch.cat(row_lengths),
        stride=len(lengths),
        length_per_key=[len(column) for column in values],
    )


def _no_candidates(batch: Batch) -> dict[str, object]:
    return {
        "num_candidates": torch.zeros_like(batch.num_candidates),
        "candidate_timestamps": batch.candidate_timestamps[:0],
        "labels": {name: labels[:0] for name, labels in batch.labels.items()},
        "weights": {},
    }


def _no_events(batch: Batch) -> dict[str, object]:
    return {
        "uih_lengths": torch.zeros_like(batch.uih_lengths),
        "uih_timestamps": batch.uih_timestamps[:0],
        "uih_actions": batch.uih_actions[:0],
        "uih_watch_time": batch.uih_watch_time[:0],
        "channel_events": {name: events[:0] for name, events in batch.channel_events.items()},
        "channel_lengths": {name: torch.zeros_like(n) for name, n in batch.channel_lengths.items()},
    }
