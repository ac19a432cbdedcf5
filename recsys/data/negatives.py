"""Adds to the batch of a model that searches items what belongs to no row: the items that all queries are
compared with, and their features.

In evaluation they are the whole catalogue. In training with sampled negatives they are drawn ones and the
items of the batch's own histories, which every loss over samples needs: among them are all positives.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.convert.block import Flat
from recsys.data.convert.item_catalogue import Catalogue, occurrences
from recsys.data.hashing import buckets, combine, uniform
from recsys.data.schema.contract import Mode
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.data.workers.packer import Arrays

_NEGATIVES = 4
"""Stream of the hash that draws negatives; 1 to 3 are the plan's and the converter's."""

_NOTHING = np.empty(0, np.int64)


class SharedColumns(NamedTuple):
    """Columns of a batch that belong to no row, by name.

    Attributes:
        ids: int64 rows of tables: the items, and then their features.
        value_counts: of each multi-valued feature, int64 values of each item.
        numbers: float32, one an item.
    """

    ids: dict[str, np.ndarray]
    value_counts: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]


class SharedItems:
    """Makes these columns for one config."""

    def __init__(self, pipeline: pb.Pipeline, mode: Mode) -> None:
        self._negatives = Negatives(pipeline, mode)
        self._columns = features.columns(pipeline, pb.ITEM)
        self._shared = features.shared_columns(pipeline)
        keys = [column.name for column in features.columns(pipeline) if column.table]
        self._num_keys = len(keys)
        self._history = keys.index(features.PREFIX[pb.HISTORY] + features.searched_item(pipeline).name)
        self._samples = mode == "train" and features.samples_negatives(pipeline)
        # A package predicts without the file: it has the vectors.
        self._catalogue = Catalogue(pipeline) if self._columns and mode != "predict" else None
        self._weights = _weights(pipeline) if self._samples else None
        self._always: SharedColumns | None = None

    def of(self, arrays: Arrays, epoch: int, index: int) -> SharedColumns:
        """The columns of a batch, which is number `index` of the epoch's plan."""
        if self._samples:
            events = self._events(arrays)
            return self._describe(self._negatives.draw(epoch, index), np.unique(events), len(events))
        if self._always is None:
            self._always = self._describe(self._negatives.draw(epoch, index), _NOTHING, 0)
        return self._always

    def _events(self, arrays: Arrays) -> np.ndarray:
        """Known items of the batch's events, as rows of the item table."""
        ends = np.cumsum(arrays.id_lengths.reshape(self._num_keys, -1).sum(axis=1))
        start = ends[self._history - 1] if self._history else 0
        events = arrays.id_values[start : ends[self._history]]
        return events[events > 0]

    def _describe(self, negatives: np.ndarray, batch_items: np.ndarray, num_events: int) -> SharedColumns:
        items = np.concatenate([negatives, batch_items])
        ids = dict(zip(self._shared, (negatives, batch_items), strict=False))
        known = self._catalogue.take(items) if self._catalogue else self._unknown()
        counts, numbers = {}, {}
        for column in self._columns:
            flat = known[column.name]
            if column.table is None:
                numbers[column.name] = flat.values
                continue
            ids[column.name] = flat.values
            if flat.offsets is not None:
                counts[column.name] = np.diff(flat.offsets)
        if isinstance(self._weights, LogWeights):
            numbers[features.LOG_WEIGHTS] = self._weights.of_items(items, num_events)
        elif self._weights is not None:
            numbers[features.LOG_WEIGHTS] = self._weights.log_weights(negatives)
        return SharedColumns(ids, counts, numbers)

    def _unknown(self) -> Mapping[str, Flat]:
        return {
            column.name: Flat(
                pb.ITEM,
                _NOTHING if column.table else np.empty(0, np.float32),
                np.zeros(1, np.int64) if column.multi_valued else None,
            )
            for column in self._columns
        }


class Negatives:
    """Item rows that a batch's queries are compared with; row 0 is no item, so negative k of the catalogue is
    row k + 1."""

    def __init__(self, pipeline: pb.Pipeline, mode: Mode) -> None:
        self._rows = features.table_rows(features.searched_item(pipeline))
        self._seed = pipeline.train.seed
        drawn = mode == "train" and features.samples_negatives(pipeline)
        softmax = model_of(pipeline).softmax
        self._count = num_drawn(softmax) if drawn else None
        self._catalogue = None if drawn else np.arange(1, self._rows)
        self._frequencies = Frequencies.of(pipeline) if drawn and softmax.HasField("frequency") else None

    def draw(self, epoch: int, index: int) -> np.ndarray:
        """The whole catalogue, or for training with sampled negatives a draw (with repetition), uniform or by
        frequency, that depends on nothing else."""
        if self._catalogue is not None:
            return self._catalogue
        hashes = combine(self._seed, epoch, _NEGATIVES, index, np.arange(self._count))
        if self._frequencies is not None:
            return self._frequencies.draw(hashes)
        return buckets(hashes, self._rows - 1) + 1


class Frequencies:
    """Chances of items to be drawn: in proportion to their events in training to some power.

    Args:
        counts: [rows of the item table], events of each item in training; row 0 is no item.
        power: 0 makes all equal, 1 follows popularity.
        num_drawn: how many are drawn for a batch.
    """

    def __init__(self, counts: np.ndarray, power: float, num_drawn: int) -> None:
        # An item that training has not counted is drawn as one that was seen once.
        chances = np.maximum(counts[1:], 1.0) ** power
        self._chances = chances / chances.sum()
        self._ends = np.cumsum(self._chances)
        self._drawn = num_drawn

    @classmethod
    def of(cls, pipeline: pb.Pipeline) -> "Frequencies":
        """By the counts in the vocabulary file of a resolved pipeline's items."""
        chosen = model_of(pipeline).softmax.frequency
        return cls(_counts(pipeline), chosen.power, chosen.num_negatives)

    def draw(self, hashes: np.ndarray) -> np.ndarray:
        """int64 rows of the item table, one a hash."""
        found = np.searchsorted(self._ends, uniform(hashes) * self._ends[-1], side="right")
        return np.minimum(found, len(self._ends) - 1) + 1

    def log_weights(self, rows: np.ndarray) -> np.ndarray:
        """float32, -log of how often each of these rows of the item table is expected in a draw: then the
        sum of weight x exp(score) over drawn items is expected to be that over the catalogue (Bengio and
        Senecal 2008)."""
        return -np.log(self._drawn * self._chances[rows - 1]).astype(np.float32)


class LogWeights:
    """-log of how often an item is expected among the negatives of a batch of n events: (drawn / items of the
    catalogue) + 1 - (1 - share of all training events)^n, as it is there once or not at all.

    Then the sum over negatives of weight x exp(score) is expected to be that over the catalogue (Bengio and
    Senecal 2008; Yi et al. 2019 for negatives in the batch).

    Args:
        counts: [rows of the item table], events of each item in training; row 0 is no item.
        num_drawn: negatives drawn uniformly.
    """

    def __init__(self, counts: np.ndarray, num_drawn: int) -> None:
        # An item that training has not counted may still be in a batch, and counts as seen once.
        self._share = np.clip(counts / max(counts.sum(), 1), 1 / max(counts.sum(), 1), 1)
        self._drawn = num_drawn / max(len(counts) - 1, 1)

    @classmethod
    def of(cls, pipeline: pb.Pipeline) -> "LogWeights":
        """By the counts in the vocabulary file of a resolved pipeline's items."""
        return cls(_counts(pipeline), num_drawn(model_of(pipeline).softmax))

    def of_items(self, rows: np.ndarray, num_events: int) -> np.ndarray:
        """float32, one for each row of the item table in `rows`."""
        included = -np.expm1(num_events * np.log1p(-np.minimum(self._share[rows], 1 - 1e-12)))
        return -np.log(self._drawn + included).astype(np.float32)


def num_drawn(softmax: pb.SoftmaxLoss) -> int:
    """Negatives of a batch that are drawn."""
    if softmax.HasField("in_batch"):
        return softmax.in_batch.num_uniform
    return softmax.frequency.num_negatives if softmax.HasField("frequency") else softmax.uniform.num_negatives


def _weights(pipeline: pb.Pipeline) -> LogWeights | Frequencies | None:
    """What weighs the negatives of training, if the config wants it."""
    softmax = model_of(pipeline).softmax
    # Only of the kind that is chosen: what is not set has defaults, too.
    if softmax.HasField("in_batch") and softmax.in_batch.log_q:
        return LogWeights.of(pipeline)
    if softmax.HasField("frequency") and softmax.frequency.log_q:
        return Frequencies.of(pipeline)
    return None


def _counts(pipeline: pb.Pipeline) -> np.ndarray:
    """Events of each row of the item table in training, from the vocabulary file of the searched item."""
    item = features.searched_item(pipeline)
    vocabulary = mappings(pipeline)[item.id.table]
    if not isinstance(vocabulary, Vocabulary):
        raise ValueError(f"features {item.name}: the item of a {model_of(pipeline).kind} has a vocabulary")
    return occurrences(vocabulary, item.id.vocabulary.file)
