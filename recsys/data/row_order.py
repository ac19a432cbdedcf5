"""Where the ids of a vocabulary lie in their embedding table.

A vocabulary lists the most frequent ids first, and a table that is sharded row-wise is cut into blocks of
rows: in the vocabulary's order the first rank would answer nearly all lookups of all ranks. So the ids of a
sharded table are dealt out over its rows, by a bijection that follows from their number alone: the same for
every world size, and for training, evaluation and packages.
"""

import math

import numpy as np

from recsys import protos as pb

_GOLDEN = (math.sqrt(5) - 1) / 2
_MOST = math.isqrt(2**63 - 1)
"""Ids, so that no product overflows: 3e9."""


class RowOrder:
    """Table rows of the ids 0, 1, ... count - 1 of a vocabulary; row 0 stands for ids that are not in it.

    Dealt out, id i lies in row 1 + i * step mod count, and step is next to the golden section of count: the
    first k ids then lie evenly, for every k (Knuth, The Art of Computer Programming 3, 6.4, theorem S).

    Args:
        count: number of ids.
        spread: deal them out; else id i lies in row i + 1.

    Raises:
        ValueError: more ids than int64 can multiply.
    """

    def __init__(self, count: int, *, spread: bool):
        if count > _MOST:
            raise ValueError(f"count is {count}; a vocabulary has at most {_MOST} ids")
        self.count = max(count, 1)
        self.step = _step(self.count) if spread else 1
        self._back = pow(self.step, -1, self.count)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """int64 table rows of ids by their places in the vocabulary, counted from 0."""
        return 1 + np.asarray(places, np.int64) * self.step % self.count

    def places(self, rows: np.ndarray) -> np.ndarray:
        """int64 places in the vocabulary of table rows; -1 for row 0."""
        rows = np.asarray(rows, np.int64)
        return np.where(rows == 0, -1, (rows - 1) * self._back % self.count)


def is_spread(pipeline: pb.Pipeline) -> bool:
    """Whether the ids of a config's tables are dealt out; in replicated tables they lie as listed."""
    return pipeline.model.embedding.placement == pb.Embedding.SHARDED


def _step(count: int) -> int:
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) > 1:
        step += 1
    return step
