"""Batches of one side: users with their history, candidates alone, events alone.

A model that scores with a cache looks up and encodes one of them at a time. A half is a batch of the same
rows in which everything else is empty.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.ops import Selection, SequenceLayout


class Halves:
    """Takes batches of a resolved pipeline apart."""

    def __init__(self, pipeline: pb.Pipeline):
        self.columns = features.columns(pipeline)

    def users(self, batch: Batch) -> Batch:
        """Users and events; contextual and history tokens."""
        changed = self._cut(batch, (pb.USER, pb.HISTORY), SequenceLayout.without_targets)
        return replace(changed, **_no_candidates(batch))

    def candidates(self, batch: Batch) -> Batch:
        """Candidates; target tokens."""
        changed = self._cut(batch, (pb.CANDIDATE,), SequenceLayout.targets_only)
        return replace(changed, **_no_events(batch))

    def events(self, batch: Batch) -> Batch:
        """Events; history tokens."""
        changed = self._cut(batch, (pb.HISTORY,), SequenceLayout.history_only)
        return replace(changed, **_no_candidates(batch))

    def _cut(
        self, batch: Batch, sides: Collection[int], select: Callable[[SequenceLayout], Selection]
    ) -> Batch:
        kept = {column.name for column in self.columns if column.side in sides}
        return replace(
            batch,
            layout=select(batch.layout).layout,
            channel_layout=batch.channel_layout and select(batch.channel_layout).layout,
            ids=_ids(batch.ids, kept),
            value_counts=_only(batch.value_counts, kept),
            numbers=_only(batch.numbers, kept),
        )


def without_catalogue(batch: Batch, pipeline: pb.Pipeline) -> Batch:
    """A retriever's batch without the items that its queries are compared with; its rows stay as they are."""
    kept = {column.name for column in features.columns(pipeline)}
    return replace(
        batch,
        ids=_ids(batch.ids, kept),
        value_counts=_only(batch.value_counts, kept),
        numbers=_only(batch.numbers, kept),
    )


def _no_candidates(batch: Batch) -> dict[str, object]:
    return {
        "num_candidates": torch.zeros_like(batch.num_candidates),
        "candidate_timestamps": batch.candidate_timestamps[:0],
        "labels": {name: labels[:0] for name, labels in batch.labels.items()},
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


def _only(tensors: dict[str, Tensor], kept: Collection[str]) -> dict[str, Tensor]:
    return {name: tensor if name in kept else tensor[:0] for name, tensor in tensors.items()}


def _ids(ids: KeyedJaggedTensor, kept: Collection[str]) -> KeyedJaggedTensor:
    """The same keys and rows; other columns have no values."""
    keys, sizes, rows = ids.keys(), ids.length_per_key(), ids.stride()
    values, lengths = ids.values().split(sizes), ids.lengths().split([rows] * len(keys))
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([own if key in kept else own[:0] for key, own in zip(keys, values, strict=True)]),
        lengths=torch.cat(
            [own if key in kept else torch.zeros_like(own) for key, own in zip(keys, lengths, strict=True)]
        ),
        stride=rows,
        # Known here, so that nobody has to ask the device.
        length_per_key=[size if key in kept else 0 for key, size in zip(keys, sizes, strict=True)],
    )
