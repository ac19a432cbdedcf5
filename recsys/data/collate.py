"""From arrays that a reader sent to a `Batch`, in the training process: tensors, layout, shared negatives,
position."""

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import features
from recsys import protos as pb
from recsys.data.arrays import Arrays
from recsys.data.batch import Batch, LayoutRule, Position, Rows
from recsys.data.contract import Mode
from recsys.data.counts import Counts
from recsys.data.hashing import buckets, combine
from recsys.ops import SequenceLayout

_NEGATIVES = 4
"""Stream of the hash that draws negatives; 1 to 3 are the plan's and the converter's."""


class Collator:
    """Makes batches for one config."""

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, mode: Mode) -> None:
        self._rule = rule
        self._keys = [column.name for column in features.columns(pipeline) if column.table]
        self._negatives = Negatives(pipeline, mode) if pipeline.model.HasField("retriever") else None

    def collate(self, arrays: Arrays, position: Position, index: int) -> Batch:
        """The batch of some arrays.

        Args:
            position: what the batch tells the trainer.
            index: number of the batch in the plan of `position.epoch`; decides its negatives.
        """
        candidates = torch.from_numpy(arrays.num_candidates)
        events = torch.from_numpy(arrays.uih_lengths)
        in_channels = _tensors(arrays.channel_lengths)
        channels = [self._layout(lengths, candidates) for lengths in in_channels.values()]
        return Batch(
            layout=self._layout(events, candidates),
            channel_layout=SequenceLayout.join(channels) if channels else None,
            channel_events=_tensors(arrays.channel_events),
            channel_lengths=in_channels,
            uih_lengths=events,
            num_candidates=candidates,
            ids=self._ids(arrays, position.epoch, index),
            value_counts=_tensors(arrays.value_counts),
            numbers=_tensors(arrays.numbers),
            request_time=torch.from_numpy(arrays.request_time),
            uih_timestamps=torch.from_numpy(arrays.uih_timestamps),
            uih_actions=torch.from_numpy(arrays.uih_actions),
            uih_watch_time=torch.from_numpy(arrays.uih_watch_time),
            candidate_timestamps=torch.from_numpy(arrays.candidate_timestamps),
            labels=_tensors(arrays.labels),
            sample_weight=torch.from_numpy(arrays.sample_weight),
            group=torch.from_numpy(arrays.group),
            position=position,
            rows=Rows(
                torch.from_numpy(arrays.file),
                torch.from_numpy(arrays.row),
                arrays.keys,
                Counts.of(arrays.counts),
            ),
        )

    def _layout(self, events: Tensor, candidates: Tensor) -> SequenceLayout:
        rule = self._rule
        targets = candidates if rule.targets else torch.zeros_like(candidates)
        lengths = rule.num_contextual + rule.tokens_per_event * events + targets
        return SequenceLayout(lengths, targets, rule.num_contextual)

    def _ids(self, arrays: Arrays, epoch: int, index: int) -> KeyedJaggedTensor:
        num_rows = len(arrays.row)
        keys, values, lengths = list(self._keys), arrays.id_values, arrays.id_lengths
        if self._negatives is not None:
            drawn = self._negatives.draw(epoch, index)
            keys.append(features.NEGATIVES)
            values = np.concatenate([values, drawn])
            lengths = np.concatenate([lengths, [len(drawn)], np.zeros(num_rows - 1, np.int64)])
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths),
            stride=num_rows,
            # Known here, so that nobody has to ask the device.
            length_per_key=lengths.reshape(len(keys), num_rows).sum(1).tolist(),
        )


class Negatives:
    """Item rows that a batch's queries are compared with; row 0 is no item, so negative k of the catalogue is
    row k + 1."""

    def __init__(self, pipeline: pb.Pipeline, mode: Mode) -> None:
        retriever = pipeline.model.retriever
        item = next(feature for feature in pipeline.features if feature.name == retriever.item_feature)
        self._rows = features.table_rows(item)
        self._seed = pipeline.train.seed
        softmax = retriever.loss.softmax
        drawn = mode == "train" and softmax.HasField("uniform")
        self._count = softmax.uniform.num_negatives if drawn else None
        self._catalogue = None if drawn else np.arange(1, self._rows)

    def draw(self, epoch: int, index: int) -> np.ndarray:
        """The whole catalogue, or for training with uniform negatives a draw (with repetition) that depends
        on nothing else."""
        if self._catalogue is not None:
            return self._catalogue
        hashes = combine(self._seed, epoch, _NEGATIVES, index, np.arange(self._count))
        return buckets(hashes, self._rows - 1) + 1


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
