"""Where the ids of a vocabulary lie in their embedding table.

A vocabulary lists the most frequent ids first, and a table that is sharded row-wise is cut into blocks of
rows: in the vocabulary's order the first rank would answer nearly all lookups of all ranks. So the ids of a
sharded table are dealt out over its rows, by a bijection that follows from the table's name and the number of
ids alone: the same for every world size, and for training, evaluation and packages.
"""

import math

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.data.hashing import hash_text

_GOLDEN = (math.sqrt(5) - 1) / 2
_MOST = 3_000_000_000
"""Ids, so that no product of two such numbers overflows."""


class RowOrder:
    """Table rows of the ids 0, 1, ... count - 1 of a vocabulary; row 0 stands for ids that are not in it.

    Dealt out, id i lies in row 1 + (start + i * step) mod count. Step is next to the golden section of count:
    the first k ids then lie evenly, for every k (Knuth, The Art of Computer Programming 3, 6.4, theorem S).
    Start is a hash of the table's name: one rank is not to have the most frequent id of every table.

    Args:
        count: number of ids.
        table: name of the table if its ids are dealt out; None if id i lies in row i + 1.

    Raises:
        ValueError: more ids than int64 can multiply.
    """

    def __init__(self, count: int, table: str | None):
        if count > _MOST:
            raise ValueError(f"count is {count}; a vocabulary has at most {_MOST} ids")
        self.count = max(count, 1)
        self.step, self.start = 1, 0
        if table is not None:
            self.step = _step(self.count)
            self.start = int(hash_text(pa.array([table]))[0]) % self.count
        self._back = pow(self.step, -1, self.count)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """int64 table rows of ids by their places in the vocabulary, counted from 0."""
        return 1 + (self.start + np.asarray(places, np.int64) * self.step) % self.count

    def places(self, rows: np.ndarray) -> np.ndarray:
        """int64 places in the vocabulary of table rows; -1 for row 0."""
        rows = np.asarray(rows, np.int64)
        return np.where(rows == 0, -1, (rows - 1 - self.start) % self.count * self._back % self.count)


def dealt_out(pipeline: pb.Pipeline, table: str) -> str | None:
    """What `RowOrder` wants to know of a table: ids of sharded ones are dealt out."""
    return table if pipeline.model.embedding.placement == pb.Embedding.SHARDED else None


def _step(count: int) -> int:
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return step
