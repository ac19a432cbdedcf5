"""Draws random rows, for speed tests and for trying a model before its data exists."""

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config.checks import loss_kind
from recsys.config.feature_kinds import Values
from recsys.config.registry import register
from recsys.data.schema.contract import FileColumn, Kind, file_columns, key_columns
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.data.sources.base import File, Source

_ROWS = 1024
"""Rows per row group."""

_POWER = 1.05
"""Exponent of the power law that ids follow."""

_MOST_IDS = 10_000
"""Number of different ids of a feature whose kind has no mapping."""

_START = 1_700_000_000
"""Request time of the first row, in seconds since 1970."""

_DAY = 86_400
"""Seconds per day."""

_MOST_VALUES = 3
"""Most values of a multi-valued feature; the smallest number is 0."""


@register(pb.SyntheticSource)
class SyntheticSource(Source):
    """One pseudo-file with all columns that the config reads; row group i has the seed (seed, i)."""

    unique_keys = True

    def __init__(self, config: pb.SyntheticSource, pipeline: pb.Pipeline) -> None:
        self.files = []
        self._config = config
        self._pipeline = pipeline
        self._columns = {
            column.name: column for mode in ("train", "evaluate") for column in file_columns(pipeline, mode)
        }
        self._mappings: dict | None = None

    @classmethod
    def open(cls, config: pb.SyntheticSource, *, pipeline: pb.Pipeline) -> "SyntheticSource":
        """Draws one row to learn the schema, which reads the vocabularies.

        Raises:
            DataError: a vocabulary cannot be used.
        """
        source = cls(config, pipeline)
        rows = [min(_ROWS, config.num_rows - first) for first in range(0, config.num_rows, _ROWS)]
        name = f"synthetic(num_rows={config.num_rows}, seed={config.seed})"
        schema = source._draw(0, 1).schema
        fingerprint = config.SerializeToString(deterministic=True).hex()
        source.files = [File(name, 0, fingerprint, tuple(rows), schema)]
        return source

    def __getstate__(self) -> dict:
        # Vocabularies may be large; the other process reads its own.
        return {**self.__dict__, "_mappings": None}

    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        """Draws a row group; see `Source.read`."""
        return self._draw(row_group, self.files[file].rows[row_group]).select(columns)

    def _draw(self, row_group: int, num_rows: int) -> pa.Table:
        config = self._config
        random = np.random.default_rng([config.seed, row_group])
        first_row = row_group * _ROWS
        # All request times differ, so that no row repeats another row's key and time.
        request_time = _START + np.arange(first_row, first_row + num_rows)
        sizes = {
            pb.USER: np.ones(num_rows, np.int64),
            pb.HISTORY: self._history_lengths(random, num_rows),
            pb.CANDIDATE: random.integers(config.min_candidates, config.max_candidates + 1, num_rows),
        }
        columns = {
            name: pa.array(np.arange(first_row, first_row + num_rows)) for name in key_columns(self._pipeline)
        }
        for name, column in self._columns.items():
            total = int(sizes[column.side].sum())
            if column.kind is Kind.TIME:
                values = self._times(random, column, request_time, sizes[column.side])
            elif column.multi_valued:
                counts = random.integers(0, _MOST_VALUES + 1, total)
                values = _lists(self._values(random, column, int(counts.sum())), counts)
            else:
                values = self._values(random, column, total)
            columns[name] = values if column.side == pb.USER else _lists(values, sizes[column.side])
        return pa.table(columns)

    def _history_lengths(self, random: np.random.Generator, num_rows: int) -> np.ndarray:
        shortest, longest = self._config.min_history_len, self._config.max_history_len
        if not self._config.history_len_exponent:
            return random.integers(shortest, longest + 1, num_rows)
        lengths = np.arange(shortest, longest + 1)
        chances = lengths ** -float(self._config.history_len_exponent)
        return random.choice(lengths, num_rows, p=chances / chances.sum())

    def _times(
        self, random: np.random.Generator, column: FileColumn, request_time: np.ndarray, sizes: np.ndarray
    ) -> pa.Array:
        if column.side == pb.USER:
            return pa.array(request_time)
        latest = np.repeat(request_time, sizes)
        if column.side == pb.CANDIDATE:
            return pa.array(latest)
        row = np.repeat(np.arange(len(sizes)), sizes)
        times = latest - random.integers(0, 30 * _DAY, len(row))
        return pa.array(times[np.lexsort((times, row))])

    def _values(self, random: np.random.Generator, column: FileColumn, count: int) -> pa.Array:
        if column.kind is Kind.FEATURE and Values.REAL not in column.values:
            return self._ids(random, column, count)
        if column.kind is Kind.ACTIONS:
            return pa.array(random.integers(0, 256, count))
        if column.kind is Kind.LABEL_BITS:
            return pa.array(random.integers(0, 2**63, count, dtype=np.int64))
        if column.kind is Kind.LABEL and loss_kind(column.task.loss) == "binary":
            return pa.array(random.integers(0, 2, count).astype(np.float32))
        return pa.array(random.exponential(10.0, count).astype(np.float32))

    def _ids(self, random: np.random.Generator, column: FileColumn, count: int) -> pa.Array:
        if self._mappings is None:
            self._mappings = mappings(self._pipeline)
        mapping = self._mappings.get(column.readers[0].table)
        # This is the inverse of the cumulative distribution function of x^-a on [1, n].
        num_ids = max(1, getattr(mapping, "rows", _MOST_IDS) - 1)
        uniform = random.random(count)
        rank = (1 - uniform * (1 - num_ids ** (1 - _POWER))) ** (1 / (1 - _POWER))
        rows = np.clip(rank.astype(np.int64), 1, num_ids)
        # A vocabulary lists the most frequent ids first, wherever their table rows are.
        if isinstance(mapping, Vocabulary):
            return mapping.ids.take(pa.array(rows - 1))
        ids = pa.array(rows)
        return ids if Values.INTEGER in column.values else ids.cast(pa.string())


def _lists(values: pa.Array, counts: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), values)
