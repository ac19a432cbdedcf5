"""Makes the negatives of a batch: items that all queries are compared with, their features and logQ weights.

In evaluation the negatives are the whole catalogue. In training with sampled negatives they are drawn items
(uniform, or by frequency) and the items of the batch's histories (in-batch negatives). Every loss over
samples needs the latter, because all positives are among them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.convert.column_block import FlatColumn
from recsys.data.convert.item_catalogue import ItemCatalogue, occurrences
from recsys.data.convert.packer import BatchArrays
from recsys.data.hashing import buckets, combine, uniform
from recsys.data.schema.contract import Mode
from recsys.data.schema.vocabulary import Vocabulary, mappings

_NEGATIVES = 4
"""Hash stream of negatives. The plan uses streams 1 and 2, the converter 3 and 5."""

_NO_ROWS = np.empty(0, np.int64)


class NegativeColumns(NamedTuple):
    """The columns of a batch that belong to no row, by column name.

    Attributes:
        ids: int64 rows of embedding tables: first the items, then their features.
        value_counts: int64 number of values of each item, for multi-valued features.
        numbers: float32, one per item.
    """

    ids: dict[str, np.ndarray]
    value_counts: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]


class NegativesBuilder:
    """Makes the columns of negatives for the batches of one config.

    Args:
        pipeline: resolved.
        sampler: draws negatives.
        catalogue: features of items; None if the config has none or the mode needs none.
        log_q: computes the weights of the negatives; None for negatives without weights.
    """

    def __init__(
        self,
        pipeline: pb.Pipeline,
        sampler: "NegativeSampler",
        catalogue: ItemCatalogue | None,
        log_q: "InBatchLogQ | FrequencySampler | None",
    ) -> None:
        self._sampler = sampler
        self._catalogue = catalogue
        self._log_q = log_q
        self._columns = features.columns(pipeline, pb.ITEM)
        self._item_columns = features.shared_columns(pipeline)
        keys = [column.name for column in features.columns(pipeline) if column.table]
        self._num_keys = len(keys)
        self._history = keys.index(features.PREFIX[pb.HISTORY] + features.searched_item(pipeline).name)
        self._whole_catalogue: NegativeColumns | None = None

    @classmethod
    def open(
        cls, pipeline: pb.Pipeline, mode: Mode, rank: int = 0, world_size: int = 1
    ) -> "NegativesBuilder":
        """Reads the features of items, and their counts in training if weights or draws need them.

        Args:
            pipeline: resolved.
            mode: purpose of the batches.
            rank, world_size: in training, a rank may get only its part of the catalogue, see
                `features.divides_catalogue`.

        Raises:
            DataError: a file cannot be used.
        """
        sampler = NegativeSampler.open(pipeline, mode, rank, world_size)
        # A package predicts without the item file, because it holds the item vectors.
        described = features.columns(pipeline, pb.ITEM) and mode != "predict"
        catalogue = ItemCatalogue.open(pipeline) if described else None
        return cls(pipeline, sampler, catalogue, _read_log_q(pipeline, sampler))

    def columns(self, arrays: BatchArrays, epoch: int, index: int) -> NegativeColumns:
        """Makes the columns of batch `index` of the epoch's plan."""
        if self._sampler.draws:
            events = self._events(arrays)
            return self._describe(self._sampler.draw(epoch, index), np.unique(events), len(events))
        if self._whole_catalogue is None:
            self._whole_catalogue = self._describe(self._sampler.draw(epoch, index), _NO_ROWS, 0)
        return self._whole_catalogue

    def _events(self, arrays: BatchArrays) -> np.ndarray:
        """Returns the known items of the batch's events, as rows of the item table."""
        ends = np.cumsum(arrays.id_lengths.reshape(self._num_keys, -1).sum(axis=1))
        start = ends[self._history - 1] if self._history else 0
        events = arrays.id_values[start : ends[self._history]]
        return events[events > 0]

    def _describe(self, drawn: np.ndarray, in_batch: np.ndarray, num_events: int) -> NegativeColumns:
        """Looks up the features and weights of the drawn items and of the batch's items."""
        items = np.concatenate([drawn, in_batch])
        ids = dict(zip(self._item_columns, (drawn, in_batch), strict=False))
        item_features = self._catalogue.take(items) if self._catalogue else self._no_features()
        counts, numbers = {}, {}
        for column in self._columns:
            flat = item_features[column.name]
            if column.table is None:
                numbers[column.name] = flat.values
                continue
            ids[column.name] = flat.values
            if flat.offsets is not None:
                counts[column.name] = np.diff(flat.offsets)
        if isinstance(self._log_q, InBatchLogQ):
            numbers[features.LOG_WEIGHTS] = self._log_q.log_weights(items, num_events)
        elif self._log_q is not None:
            numbers[features.LOG_WEIGHTS] = self._log_q.log_weights(drawn)
        return NegativeColumns(ids, counts, numbers)

    def _no_features(self) -> Mapping[str, FlatColumn]:
        return {
            column.name: FlatColumn(
                pb.ITEM,
                _NO_ROWS if column.table else np.empty(0, np.float32),
                np.zeros(1, np.int64) if column.multi_valued else None,
            )
            for column in self._columns
        }


class NegativeSampler:
    """Draws negatives for training batches, or returns the whole catalogue, as rows of the item table.

    Row 0 is not an item, so item k of the catalogue is row k + 1.

    Args:
        num_rows: rows of the item table.
        seed: seed of the draws.
        num_drawn: negatives per batch; None returns the whole catalogue.
        frequencies: draws by frequency; None draws uniformly.
        catalogue: the rows that stand for the whole catalogue; None means all rows but row 0.
    """

    def __init__(
        self,
        num_rows: int,
        seed: int,
        num_drawn: int | None,
        frequencies: "FrequencySampler | None" = None,
        catalogue: range | None = None,
    ) -> None:
        self.draws = num_drawn is not None
        self.frequencies = frequencies
        self._rows = num_rows
        self._seed = seed
        self._count = num_drawn
        rows = catalogue if catalogue is not None else range(1, num_rows)
        self._catalogue = None if self.draws else np.arange(rows.start, rows.stop)

    @classmethod
    def open(cls, pipeline: pb.Pipeline, mode: Mode, rank: int = 0, world_size: int = 1) -> "NegativeSampler":
        """Reads the training counts of items if the config draws negatives by frequency.

        In training, a rank may get only its part of the catalogue.
        """
        num_rows = features.table_rows(features.searched_item(pipeline))
        seed, softmax = pipeline.train.seed, model_of(pipeline).softmax
        if mode != "train" or not features.samples_negatives(pipeline):
            divided = mode == "train" and features.divides_catalogue(pipeline)
            rows = features.catalogue_rows(num_rows, rank, world_size) if divided else None
            return cls(num_rows, seed, None, catalogue=rows)
        frequencies = FrequencySampler.open(pipeline) if softmax.HasField("frequency") else None
        return cls(num_rows, seed, num_drawn(softmax), frequencies)

    def draw(self, epoch: int, index: int) -> np.ndarray:
        """Draws the negatives of a batch with repetition; the draw depends only on epoch, index and seed."""
        if self._catalogue is not None:
            return self._catalogue
        hashes = combine(self._seed, epoch, _NEGATIVES, index, np.arange(self._count))
        if self.frequencies is not None:
            return self.frequencies.draw(hashes)
        return buckets(hashes, self._rows - 1) + 1


class FrequencySampler:
    """Draws items with probabilities proportional to a power of their number of training events.

    Args:
        counts: [rows of the item table], training events of each item; row 0 is not an item.
        power: exponent of the counts; 0 makes all items equally likely, 1 follows popularity.
        num_drawn: draws per batch.
    """

    def __init__(self, counts: np.ndarray, power: float, num_drawn: int) -> None:
        # An item without training events is drawn as if it had one event.
        chances = np.maximum(counts[1:], 1.0) ** power
        self._chances = chances / chances.sum()
        self._ends = np.cumsum(self._chances)
        self._drawn = num_drawn

    @classmethod
    def open(cls, pipeline: pb.Pipeline) -> "FrequencySampler":
        """Reads the counts in the vocabulary file of a resolved pipeline's items."""
        chosen = model_of(pipeline).softmax.frequency
        return cls(read_counts(pipeline), chosen.power, chosen.num_negatives)

    def draw(self, hashes: np.ndarray) -> np.ndarray:
        """Maps each hash to an int64 row of the item table."""
        places = np.searchsorted(self._ends, uniform(hashes) * self._ends[-1], side="right")
        return np.minimum(places, len(self._ends) - 1) + 1

    def log_weights(self, rows: np.ndarray) -> np.ndarray:
        """Computes the log weights of rows of the item table, float32: -log of their expected number of
        occurrences in a draw.

        Let weight = exp(log weight). The sum of weight x exp(score) over drawn items is an unbiased estimate
        of the sum of exp(score) over the catalogue (Bengio and Senecal 2008).
        """
        return -np.log(self._drawn * self._chances[rows - 1]).astype(np.float32)


class InBatchLogQ:
    """Computes the log weights of in-batch and uniform negatives (logQ): -log of the expected number of
    occurrences of an item.

    In a batch of n events that number is (drawn / items of the catalogue) + 1 - (1 - the item's share of all
    training events)^n, because the batch's items occur at most once each. Let weight = exp(log weight). The
    sum of weight x exp(score) over negatives estimates the sum of exp(score) over the catalogue (Bengio and
    Senecal 2008; Yi et al. 2019 for in-batch negatives).

    Args:
        counts: [rows of the item table], training events of each item; row 0 is not an item.
        num_drawn: number of negatives that are drawn uniformly.
    """

    def __init__(self, counts: np.ndarray, num_drawn: int) -> None:
        # An item without training events may still be in a batch; it counts as if it had one event.
        self._share = np.clip(counts / max(counts.sum(), 1), 1 / max(counts.sum(), 1), 1)
        self._drawn = num_drawn / max(len(counts) - 1, 1)

    @classmethod
    def open(cls, pipeline: pb.Pipeline) -> "InBatchLogQ":
        """Reads the counts in the vocabulary file of a resolved pipeline's items."""
        return cls(read_counts(pipeline), num_drawn(model_of(pipeline).softmax))

    def log_weights(self, rows: np.ndarray, num_events: int) -> np.ndarray:
        """Computes the log weights of rows of the item table in a batch of `num_events` events, float32."""
        included = -np.expm1(num_events * np.log1p(-np.minimum(self._share[rows], 1 - 1e-12)))
        return -np.log(self._drawn + included).astype(np.float32)


def num_drawn(softmax: pb.SoftmaxLoss) -> int:
    """Returns the number of negatives that are drawn for a batch."""
    if softmax.HasField("in_batch"):
        return softmax.in_batch.num_uniform
    return softmax.frequency.num_negatives if softmax.HasField("frequency") else softmax.uniform.num_negatives


def _read_log_q(pipeline: pb.Pipeline, sampler: NegativeSampler) -> InBatchLogQ | FrequencySampler | None:
    """Returns the object that computes the log weights of drawn negatives, or None without weights."""
    softmax = model_of(pipeline).softmax
    if not sampler.draws:
        return None
    # `log_q` has a default in both messages, so read only the message that is set.
    if softmax.HasField("in_batch") and softmax.in_batch.log_q:
        return InBatchLogQ.open(pipeline)
    if softmax.HasField("frequency") and softmax.frequency.log_q:
        return sampler.frequencies
    return None


def read_counts(pipeline: pb.Pipeline) -> np.ndarray:
    """Reads the training events of each row of the item table from the items' vocabulary file."""
    item = features.searched_item(pipeline)
    vocabulary = mappings(pipeline)[item.id.table]
    if not isinstance(vocabulary, Vocabulary):
        raise ValueError(
            f"features {item.name}: the item feature of a {model_of(pipeline).kind} needs a vocabulary"
        )
    return occurrences(vocabulary, item.id.vocabulary.file)
