"""Finds the rows of an earlier embedding table that the rows of a new table continue, by original ids.

A new vocabulary has other ids, or the same ids in other rows. A warm start copies the row of each id that
both tables have; see `training.warm_start`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.data.schema.vocabulary import Buckets, HashBuckets, Vocabulary
from recsys.errors import DataError

NONE = -1
"""Stands in for the row of an id that the earlier table does not have."""


@dataclass(frozen=True)
class CarryOver:
    """Two mappings of the same table, the earlier and the new one, between which rows can be carried over.

    Between vocabularies, an id's row goes to the same id's new row, and row 0 (unknown ids) to row 0. From
    hash buckets to a vocabulary, each id takes the row of its bucket, and row 0 none. From a vocabulary to
    hash buckets, a bucket takes the row of the most frequent of its ids.

    Raises:
        DataError: there is no id by which rows could be found, or the ids have different types.
    """

    table: str
    before: Any
    now: Any

    def __post_init__(self) -> None:
        before, now = self.before, self.now
        if isinstance(before, Vocabulary) and isinstance(now, Vocabulary):
            if before.is_text != now.is_text:
                kinds = ["strings" if x.is_text else "integers" for x in (before, now)]
                raise DataError(
                    f"table {self.table}: its ids were {kinds[0]} in {before.name} and are {kinds[1]} in "
                    f"{now.name}, so none is the same"
                )
        elif not {type(before), type(now)} == {Vocabulary, HashBuckets}:
            raise DataError(
                f"table {self.table}: it was {_words(before)} and is {_words(now)}; rows can be found again "
                "only by the ids of a vocabulary"
            )

    @property
    def continues_unknown(self) -> bool:
        """Whether row 0, which then stands for unknown ids in both tables, is carried over."""
        return isinstance(self.before, Vocabulary) and isinstance(self.now, Vocabulary)

    def sources(self, rows: np.ndarray) -> np.ndarray:
        """Returns the int64 row of the earlier table for each row of the new table, `NONE` if there is none.

        Args:
            rows: int64, rows of the new table.
        """
        if isinstance(self.now, Vocabulary):
            return self._of_ids(self.now, rows)
        if isinstance(self.now, HashBuckets) and isinstance(self.before, Vocabulary):
            taken = np.full(self.now.rows, NONE)
            # The most frequent id comes first in a vocabulary; here it is written last, so that it counts.
            ids = self.before.ids.take(pa.array(np.arange(len(self.before))[::-1]))
            taken[self.now.map(ids)] = self.before.layout.row_of(np.arange(len(self.before))[::-1])
            return taken[rows]
        raise TypeError(f"no rows from {type(self.before).__name__} to {type(self.now).__name__}")

    def _of_ids(self, now: Vocabulary, rows: np.ndarray) -> np.ndarray:
        taken = np.full(len(rows), NONE)
        with_id = np.flatnonzero(rows)
        if isinstance(self.before, Vocabulary):
            taken[rows == 0] = 0
            earlier = self.before.map(now.original(rows[with_id]))
            taken[with_id] = np.where(earlier == 0, NONE, earlier)
        elif isinstance(self.before, HashBuckets):
            taken[with_id] = self.before.map(now.original(rows[with_id]))
        return taken


def _words(mapping: Any) -> str:
    if isinstance(mapping, Vocabulary):
        return f"a vocabulary of {len(mapping):,} ids"
    if isinstance(mapping, HashBuckets):
        return f"{mapping.rows:,} hash buckets"
    return f"{mapping.rows:,} buckets of numbers" if isinstance(mapping, Buckets) else "of another kind"
