"""Warns if nearly all ids of a column are unknown, because the vocabulary or the column is the wrong one.

Nothing else would reveal this: a model trains on unknown ids and scores them without an error.
"""

import logging

import numpy as np

from recsys import protos as pb
from recsys.config import features
from recsys.data.convert.packer import BatchArrays

ENOUGH = 200
"""Number of ids after which a column is judged; a column with fewer ids is not judged."""

MOST = 0.9
"""Largest share of unknown ids without a warning."""

logger = logging.getLogger(__name__)


class UnknownIds:
    """Counts unknown ids among the first ids of every column with a vocabulary."""

    def __init__(self, pipeline: pb.Pipeline) -> None:
        columns = [column for column in features.columns(pipeline) if column.table]
        self._names = [column.name for column in columns]
        self._files = {
            column.name: column.kind.vocabulary.file
            for column in columns
            if column.kind.vocabulary is not None
        }
        self._seen = dict.fromkeys(self._files, 0)
        self._unknown = dict.fromkeys(self._files, 0)

    def observe(self, arrays: BatchArrays) -> None:
        """Counts the ids of a batch as long as a column has not been judged."""
        if not self._files or not len(arrays.row):
            return
        ends = np.cumsum(arrays.id_lengths.reshape(len(self._names), -1).sum(axis=1))
        for name, rows in zip(self._names, np.split(arrays.id_values, ends[:-1]), strict=True):
            if name in self._files:
                self._seen[name] += len(rows)
                self._unknown[name] += int(np.count_nonzero(rows == 0))
                if self._seen[name] >= ENOUGH:
                    self._judge(name, self._files.pop(name))

    def _judge(self, name: str, file: str) -> None:
        seen, unknown = self._seen[name], self._unknown[name]
        if unknown > MOST * seen:
            logger.warning(
                "%s: %d of the first %d ids are not in %s; is it the vocabulary of this data?",
                name,
                unknown,
                seen,
                file,
            )
