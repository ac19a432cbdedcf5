"""Made-up rows, for speed tests and for trying a model before there is data."""

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config.checks import loss_kind
from recsys.config.registry import register
from recsys.data.schema.contract import Field, Kind, fields, key_columns
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.data.sources.base import File, Source

_ROWS = 1024
_POWER = 1.05
"""Exponent of the power law of ids."""

_START = 1_700_000_000
_DAY = 86_400
_MOST_VALUES = 3
"""Values of a multi-valued feature: 0 to this many."""


@register(pb.SyntheticSource)
class SyntheticSource(Source):
    """One pseudo-file; row group i is drawn from a generator of (seed, i), with the columns that the config
    reads."""

    unique_keys = True

    def __init__(self, config: pb.SyntheticSource, *, pipeline: pb.Pipeline) -> None:
        self._config = config
        self._pipeline = pipeline
        self._fields = {
            field.column: field for mode in ("train", "evaluate") for field in fields(pipeline, mode)
        }
        self._mappings: dict | None = None
        rows = [min(_ROWS, config.num_rows - first) for first in range(0, config.num_rows, _ROWS)]
        name = f"synthetic(num_rows={config.num_rows}, seed={config.seed})"
        schema = self._draw(0, 1).schema
        self.files = [File(name, 0, config.SerializeToString(deterministic=True).hex(), tuple(rows), schema)]

    def __getstate__(self) -> dict:
        # Vocabularies may be large; the other process reads its own.
        return {**self.__dict__, "_mappings": None}

    def read(self, file: int, row_group: int, columns: list[str]) -> pa.Table:
        """See `Source.read`."""
        return self._draw(row_group, self.files[file].rows[row_group]).select(columns)

    def _draw(self, row_group: int, num_rows: int) -> pa.Table:
        config = self._config
        random = np.random.default_rng([config.seed, row_group])
        first_row = row_group * _ROWS
        # All different: a key and a time occur once.
        request_time = _START + np.arange(first_row, first_row + num_rows)
        sizes = {
            pb.USER: np.ones(num_rows, np.int64),
            pb.HISTORY: random.integers(config.min_history_len, config.max_history_len + 1, num_rows),
            pb.CANDIDATE: random.integers(config.min_candidates, config.max_candidates + 1, num_rows),
        }
        columns = {
            name: pa.array(np.arange(first_row, first_row + num_rows)) for name in key_columns(self._pipeline)
        }
        for name, field in self._fields.items():
            total = int(sizes[field.side].sum())
            if field.kind is Kind.TIME:
                values = self._times(random, field, request_time, sizes[field.side])
            elif field.multi_valued:
                counts = random.integers(0, _MOST_VALUES + 1, total)
                values = _lists(self._values(random, field, int(counts.sum())), counts)
            else:
                values = self._values(random, field, total)
            columns[name] = values if field.side == pb.USER else _lists(values, sizes[field.side])
        return pa.table(columns)

    def _times(
        self, random: np.random.Generator, field: Field, request_time: np.ndarray, sizes: np.ndarray
    ) -> pa.Array:
        if field.side == pb.USER:
            return pa.array(request_time)
        latest = np.repeat(request_time, sizes)
        if field.side == pb.CANDIDATE:
            return pa.array(latest)
        row = np.repeat(np.arange(len(sizes)), sizes)
        times = latest - random.integers(0, 30 * _DAY, len(row))
        return pa.array(times[np.lexsort((times, row))])

    def _values(self, random: np.random.Generator, field: Field, count: int) -> pa.Array:
        if field.kind is Kind.ID:
            return self._ids(random, field, count)
        if field.kind is Kind.ACTIONS:
            return pa.array(random.integers(0, 256, count))
        if field.kind is Kind.LABEL_BITS:
            return pa.array(random.integers(0, 2**63, count, dtype=np.int64))
        if field.kind is Kind.LABEL and loss_kind(field.task.loss) == "binary":
            return pa.array(random.integers(0, 2, count).astype(np.float32))
        return pa.array(random.exponential(10.0, count).astype(np.float32))

    def _ids(self, random: np.random.Generator, field: Field, count: int) -> pa.Array:
        if self._mappings is None:
            self._mappings = mappings(self._pipeline)
        mapping = self._mappings[field.feature.id.table or field.feature.name]
        # The inverse of the distribution function of x^-a on [1, n].
        most = max(1, mapping.rows - 1)
        uniform = random.random(count)
        rank = (1 - uniform * (1 - most ** (1 - _POWER))) ** (1 / (1 - _POWER))
        rows = np.clip(rank.astype(np.int64), 1, most)
        # A vocabulary has its most frequent ids first, wherever their rows are.
        return mapping.ids.take(pa.array(rows - 1)) if isinstance(mapping, Vocabulary) else pa.array(rows)


def _lists(values: pa.Array, counts: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), values)
