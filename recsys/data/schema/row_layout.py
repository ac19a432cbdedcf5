"""Lays out a vocabulary's ids over the rows of their embedding table.

A vocabulary lists the most frequent ids first, and a table that is sharded row-wise is cut into blocks of
rows. If rows followed the vocabulary's order, the first rank would answer nearly all lookups of all ranks. So
a bijection spreads the ids of a sharded table over its rows. It depends only on the table's name and the
number of ids, so it is the same for every world size, and for training, evaluation and packages.
"""

import math

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config import features
from recsys.data.hashing import hash_text

_GOLDEN = (math.sqrt(5) - 1) / 2
_MAX_IDS = 3_000_000_000
"""Most ids of a table: the product of two numbers up to this one fits into int64."""


class ShardedRowLayout:
    """Maps the ids 0, 1, ... count - 1 of a vocabulary to table rows; row 0 stands for unknown ids.

    In a sharded table, id i has row 1 + (start + i * step) mod count. `step` is a number near count divided
    by the golden ratio, so that the first k ids are spread evenly for every k (Knuth, The Art of Computer
    Programming 3, 6.4, theorem S). `start` is a hash of the table's name, so that no rank has the most
    frequent id of every table.

    Args:
        count: number of ids.
        table: name of a sharded table; None if id i has row i + 1.

    Raises:
        ValueError: there are more ids than `_MAX_IDS`, whose products could overflow int64.
    """

    def __init__(self, count: int, table: str | None):
        if count > _MAX_IDS:
            raise ValueError(f"count is {count}; a vocabulary has at most {_MAX_IDS} ids")
        self.count = max(count, 1)
        self.step, self.start = 1, 0
        if table is not None:
            self.step = _step(self.count)
            self.start = int(hash_text(pa.array([table]))[0]) % self.count
        self._back = pow(self.step, -1, self.count)

    def row_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the int64 table row of each id."""
        return 1 + (self.start + np.asarray(ids, np.int64) * self.step) % self.count

    def id_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the int64 id of each table row, -1 for row 0."""
        rows = np.asarray(rows, np.int64)
        return np.where(rows == 0, -1, (rows - 1 - self.start) % self.count * self._back % self.count)


def sharded_name(pipeline: pb.Pipeline, table: str) -> str | None:
    """Returns the `table` argument of `ShardedRowLayout`: the name of a sharded table, else None."""
    return table if features.is_sharded(pipeline, table) else None


def _step(count: int) -> int:
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return step
