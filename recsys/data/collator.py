"""Turns the arrays that a reader sent into a `Batch`, in the training process: tensors, layout, negatives."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch, LayoutRule, Position, Rows
from recsys.data.convert.packer import BatchArrays
from recsys.data.counts import Counts
from recsys.data.negatives import NegativeColumns, NegativesBuilder
from recsys.data.schema.contract import Mode
from recsys.ops import SequenceLayout


class Collator:
    """Makes batches for one config.

    Args:
        pipeline: resolved.
        rule: how rows become sequences.
        negatives: makes the columns of negatives; None if the model searches no items.
    """

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, negatives: NegativesBuilder | None) -> None:
        self._rule = rule
        self._keys = [column.name for column in features.columns(pipeline) if column.table]
        columns = [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
        self._shapes = {column.name: column.batch_shape for column in columns if column.batch_shape}
        self._negatives = negatives

    @classmethod
    def open(
        cls, pipeline: pb.Pipeline, rule: LayoutRule, mode: Mode, rank: int = 0, world_size: int = 1
    ) -> "Collator":
        """Reads the features and counts of items that negatives need.

        Raises:
            DataError: a file cannot be used.
        """
        negatives = None
        if features.shared_columns(pipeline):
            negatives = NegativesBuilder.open(pipeline, mode, rank, world_size)
        return cls(pipeline, rule, negatives)

    def collate(self, arrays: BatchArrays, position: Position, index: int) -> Batch:
        """Makes a batch from the arrays of its rows.

        Args:
            arrays: the rows of the batch.
            position: the batch's place in the data, for the trainer.
            index: number of the batch in the plan of `position.epoch`; decides its negatives.
        """
        keys = self._keys
        if self._negatives is not None:
            negatives = self._negatives.columns(arrays, position.epoch, index)
            keys, arrays = [*keys, *negatives.ids], _joined(arrays, negatives)
        candidates = arrays.num_candidates
        channels = [self._layout(lengths, candidates) for lengths in arrays.channel_lengths.values()]
        return Batch(
            layout=self._layout(arrays.uih_lengths, candidates),
            channel_layout=SequenceLayout.join(channels) if channels else None,
            channel_events=_tensors(arrays.channel_events),
            channel_lengths=_tensors(arrays.channel_lengths),
            uih_lengths=torch.from_numpy(arrays.uih_lengths),
            num_candidates=torch.from_numpy(candidates),
            ids=_ids(keys, arrays),
            value_counts=_tensors(arrays.value_counts),
            numbers=self._numbers(arrays.numbers),
            request_time=torch.from_numpy(arrays.request_time),
            uih_timestamps=torch.from_numpy(arrays.uih_timestamps),
            uih_actions=torch.from_numpy(arrays.uih_actions),
            uih_watch_time=torch.from_numpy(arrays.uih_watch_time),
            candidate_timestamps=torch.from_numpy(arrays.candidate_timestamps),
            seen=torch.from_numpy(arrays.seen),
            seen_layout=SequenceLayout.counted(arrays.seen_lengths, np.zeros_like(arrays.seen_lengths), 0),
            repeated=torch.from_numpy(arrays.repeated),
            labels=_tensors(arrays.labels),
            weights=_tensors(arrays.weights),
            sample_weight=torch.from_numpy(arrays.sample_weight),
            group=torch.from_numpy(arrays.group),
            position=position,
            rows=Rows(
                torch.from_numpy(arrays.file),
                torch.from_numpy(arrays.row),
                arrays.keys,
                Counts.of(arrays.counts),
            ),
            arrays=arrays,
        )

    def _layout(self, events: np.ndarray, candidates: np.ndarray) -> SequenceLayout:
        rule = self._rule
        targets = candidates if rule.targets else np.zeros_like(candidates)
        lengths = rule.num_contextual + rule.tokens_per_event * events + targets
        return SequenceLayout.counted(lengths, targets, rule.num_contextual)

    def _numbers(self, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        shaped = {name: arrays[name].reshape(-1, *shape) for name, shape in self._shapes.items()}
        return _tensors(arrays | shaped)


def _joined(arrays: BatchArrays, negatives: NegativeColumns) -> BatchArrays:
    """Returns the columns of the rows and of the negatives, whose ids are dealt evenly to the rows."""
    num_rows = len(arrays.row)
    # On a GPU, one thread brings all ids of a row to the ranks that hold them, one after the other.
    counts = np.array([[len(ids)] for ids in negatives.ids.values()])
    lengths = counts // num_rows + (np.arange(num_rows) < counts % num_rows)
    return replace(
        arrays,
        id_values=np.concatenate([arrays.id_values, *negatives.ids.values()]),
        id_lengths=np.concatenate([arrays.id_lengths, lengths.reshape(-1)]),
        value_counts=arrays.value_counts | negatives.value_counts,
        numbers=arrays.numbers | negatives.numbers,
    )


def _ids(keys: list[str], arrays: BatchArrays) -> KeyedJaggedTensor:
    num_rows = len(arrays.row)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(arrays.id_values),
        lengths=torch.from_numpy(arrays.id_lengths),
        stride=num_rows,
        # Given here, so that the KeyedJaggedTensor does not compute it and wait for the device.
        length_per_key=arrays.id_lengths.reshape(len(keys), num_rows).sum(1).tolist(),
    )


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
