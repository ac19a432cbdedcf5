"""From arrays that a reader sent to a `Batch`, in the training process: tensors, layout, shared items,
position."""

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch, LayoutRule, Position, Rows
from recsys.data.counts import Counts
from recsys.data.negatives import SharedColumns, SharedItems
from recsys.data.schema.contract import Mode
from recsys.data.workers.packer import Arrays
from recsys.ops import SequenceLayout


class Collator:
    """Makes batches for one config."""

    def __init__(self, pipeline: pb.Pipeline, rule: LayoutRule, mode: Mode) -> None:
        self._rule = rule
        self._keys = [column.name for column in features.columns(pipeline) if column.table]
        self._shared = SharedItems(pipeline, mode) if features.shared_columns(pipeline) else None

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
        shared = SharedColumns({}, {}, {})
        if self._shared is not None:
            shared = self._shared.of(arrays, position.epoch, index)
        return Batch(
            layout=self._layout(events, candidates),
            channel_layout=SequenceLayout.join(channels) if channels else None,
            channel_events=_tensors(arrays.channel_events),
            channel_lengths=in_channels,
            uih_lengths=events,
            num_candidates=candidates,
            ids=self._ids(arrays, shared.ids),
            value_counts=_tensors(arrays.value_counts | shared.value_counts),
            numbers=_tensors(arrays.numbers | shared.numbers),
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

    def _ids(self, arrays: Arrays, shared: dict[str, np.ndarray]) -> KeyedJaggedTensor:
        num_rows = len(arrays.row)
        keys, values, lengths = [*self._keys, *shared], arrays.id_values, arrays.id_lengths
        if shared:
            of_keys = np.zeros((len(shared), num_rows), np.int64)
            # A row has to hold them.
            of_keys[:, 0] = [len(own) for own in shared.values()]
            values = np.concatenate([values, *shared.values()])
            lengths = np.concatenate([lengths, of_keys.reshape(-1)])
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths),
            stride=num_rows,
            # Known here, so that nobody has to ask the device.
            length_per_key=lengths.reshape(len(keys), num_rows).sum(1).tolist(),
        )


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
