"""Stochastic length: long histories are thinned out in training, for attention costs the square of a length.

Of a history of n events, with N = `data.max_history_len` and L = floor(N^(alpha / 2)): n <= L is kept whole;
a longer one is kept whole with probability N^alpha / n^2, and else L of its events are kept. Attention over
all of them then costs some N^alpha instead of N^2. Evaluation and prediction read all events.

Source: Zhai et al., arXiv 2402.17152, section 3.2 and the appendix on subsequence selection.
"""

from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.data.convert.block import offsets_of
from recsys.data.hashing import combine, uniform

_SMALLEST_WEIGHT = 1e-300
"""An event with weight 0 is the last to be drawn, not impossible to draw."""


class Kept(NamedTuple):
    """What is left of histories that lie end to end.

    Attributes:
        places: int64, ascending, the events that are kept.
        lengths: int64 [rows], events of each row among them.
    """

    places: np.ndarray
    lengths: np.ndarray


def limit(config: pb.StochasticLength, max_history_len: int) -> int:
    """L, the events that a thinned history keeps."""
    return max(1, int(max_history_len ** (config.alpha / 2)))


def thin_out(
    config: pb.StochasticLength,
    max_history_len: int,
    lengths: np.ndarray,
    timestamps: np.ndarray,
    rows: np.ndarray,
) -> Kept:
    """Draws which events stay.

    Args:
        max_history_len: N; no history is longer.
        lengths: int64 [rows], events of each row.
        timestamps: int64 [sum of lengths], seconds, oldest first in each row.
        rows: uint64 [rows], a hash of each row (and the epoch): all randomness comes from it.
    """
    most = limit(config, max_history_len)
    whole = max_history_len**config.alpha / np.maximum(lengths, 1).astype(np.float64) ** 2
    thinned = np.flatnonzero((lengths > most) & (uniform(combine(rows.view(np.int64), 0)) >= whole))
    keep = np.ones(len(timestamps), bool)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    counts = lengths[thinned]
    # Events of the thinned rows, one row after the other: the row, its place in it, and where it lies.
    row = np.repeat(np.arange(len(thinned)), counts)
    place = np.arange(len(row)) - np.repeat(offsets_of(counts)[:-1], counts)
    event = starts[thinned][row] + place
    keys = _keys(config, row, place, timestamps[event], rows[thinned], counts)
    # Ranked within each row by key, the largest first.
    order = np.lexsort((-keys, row))
    keep[event[order]] = place < most
    left = lengths.copy()
    left[thinned] = most
    return Kept(np.flatnonzero(keep), left)


def _keys(
    config: pb.StochasticLength,
    row: np.ndarray,
    place: np.ndarray,
    timestamps: np.ndarray,
    hashes: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """float64, one an event: the largest of a row are kept.

    Draws without replacement and with weights w are the largest of log(u) / w, u uniform (Efraimidis and
    Spirakis, Weighted random sampling with a reservoir, 2006).
    """
    if config.selection == pb.StochasticLength.NEWEST:
        return place.astype(np.float64)
    # 1 - u is in (0, 1], so its logarithm is finite.
    logarithm = np.log1p(-uniform(combine(hashes[row].view(np.int64), 1, place)))
    if config.selection == pb.StochasticLength.UNIFORM:
        return logarithm
    newest = timestamps[offsets_of(counts)[1:] - 1]
    age = (newest[row] - timestamps).astype(np.float64)
    total = np.bincount(row, age, minlength=len(counts))
    weight = 1 - age / np.where(total > 0, total, 1)[row]
    return logarithm / np.maximum(weight, _SMALLEST_WEIGHT)
