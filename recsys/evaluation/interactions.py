"""Reads the histories and targets of a split as flat arrays (`Interactions`), as evaluation does."""

from dataclasses import dataclass

import numpy as np

from recsys import protos as pb
from recsys.config import features
from recsys.data.loader import Loader
from recsys.data.schema.contract import Mode
from recsys.models.base import layout_rule

_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class Interactions:
    """The rows of a split, for a model that searches items. Items are rows of the item table, 0 for unknown.

    Attributes:
        items: int64 [U], the items of all events, row after row, oldest first in each row.
        lengths: int64 [B], number of events of each row.
        targets: int64 [N], the items to be found, row after row; empty for training rows.
        num_targets: int64 [B], number of targets of each row.
        num_items: V, number of items in the catalogue, whose rows are 1 to V.
    """

    items: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    num_targets: np.ndarray
    num_items: int

    @property
    def rows(self) -> np.ndarray:
        """Returns the row of each event, int64 [U]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def select(self, rows: slice) -> "Interactions":
        """Selects rows by a slice: a run of rows, or every n-th row."""
        chosen = np.zeros(len(self.lengths), bool)
        chosen[rows] = True
        return Interactions(
            self.items[np.repeat(chosen, self.lengths)],
            self.lengths[chosen],
            self.targets[np.repeat(chosen, self.num_targets)],
            self.num_targets[chosen],
            self.num_items,
        )


def read(pipeline: pb.Pipeline, split: str | pb.Source, mode: Mode | None = None) -> Interactions:
    """Reads the histories of a split, including events beyond `data.max_history_len`, and its targets.

    Args:
        pipeline: resolved; its model searches items.
        split: "train" (without targets), "validation", "test", or another source.
        mode: purpose of the rows; by default "predict" for "train", else "evaluate".

    Raises:
        DataError: files are missing or do not fit the config.
    """
    item = features.searched_item(pipeline)
    parts: list[Interactions] = []
    default: Mode = "predict" if split == "train" else "evaluate"
    for batch in open_rows(pipeline, split, mode or default).epoch(0):
        ids = batch.ids[features.PREFIX[pb.HISTORY] + item.name]
        targets = batch.ids.to_dict().get(features.PREFIX[pb.CANDIDATE] + item.name)
        lengths = batch.num_candidates if targets is not None else batch.num_candidates * 0
        values = targets.values() if targets is not None else ids.values()[:0]
        columns = (ids.values(), batch.uih_lengths, values, lengths)
        parts.append(Interactions(*(column.numpy() for column in columns), features.table_rows(item) - 1))
    joined = (np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS)
    return Interactions(*joined, features.table_rows(item) - 1)


_ARRAYS = ("items", "lengths", "targets", "num_targets")


def open_rows(pipeline: pb.Pipeline, split: str | pb.Source, mode: Mode) -> Loader:
    """Opens a split for reading in this process, with whole histories.

    Raises:
        DataError: files are missing or do not fit the config.
    """
    full_pipeline = pb.Pipeline()
    full_pipeline.CopyFrom(pipeline)
    full_pipeline.data.max_history_len, full_pipeline.data.num_workers = _LONGEST, 0
    return Loader.open(full_pipeline, split, layout_rule(full_pipeline), mode=mode)
