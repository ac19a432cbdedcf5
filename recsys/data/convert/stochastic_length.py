"""Subsamples long histories in training (stochastic length), as attention costs the square of their length.

Let N = `data.max_history_len` and L = floor(N^(alpha / 2)). A history of n <= L events is kept whole. A
longer history is kept whole with probability N^alpha / n^2; else L of its events are kept. Attention then
costs about N^alpha per history instead of N^2. Evaluation and prediction read all events.

Source: Zhai et al., arXiv 2402.17152, section 3.2 and the appendix on subsequence selection.
"""

from typing import NamedTuple

import numpy as np

from recsys import protos as pb
from recsys.data.convert.column_block import offsets_of
from recsys.data.hashing import combine, uniform

_SMALLEST_WEIGHT = 1e-300
"""Replaces weights of 0, so that such an event is drawn last but can be drawn."""


class KeptEvents(NamedTuple):
    """The events of histories that are kept.

    Attributes:
        places: int64, ascending indices of the kept events among all events.
        lengths: int64 [rows], number of kept events in each row.
    """

    places: np.ndarray
    lengths: np.ndarray


def limit(config: pb.StochasticLength, max_history_len: int) -> int:
    """Computes L, the number of events that a subsampled history keeps."""
    return max(1, int(max_history_len ** (config.alpha / 2)))


def subsample(
    config: pb.StochasticLength,
    max_history_len: int,
    lengths: np.ndarray,
    timestamps: np.ndarray,
    rows: np.ndarray,
) -> KeptEvents:
    """Draws the events to keep.

    Args:
        config: alpha, and how events are selected.
        max_history_len: N; no history is longer.
        lengths: int64 [rows], events of each row.
        timestamps: int64 [sum of lengths], seconds, oldest first in each row.
        rows: uint64 [rows], a hash of each row and the epoch, which decides all draws.
    """
    max_len = limit(config, max_history_len)
    keep_probability = max_history_len**config.alpha / np.maximum(lengths, 1).astype(np.float64) ** 2
    subsampled = np.flatnonzero(
        (lengths > max_len) & (uniform(combine(rows.view(np.int64), 0)) >= keep_probability)
    )
    keep = np.ones(len(timestamps), bool)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    counts = lengths[subsampled]
    # For each event of the subsampled rows: its row, its index in the row, and its index among all events.
    row = np.repeat(np.arange(len(subsampled)), counts)
    place = np.arange(len(row)) - np.repeat(offsets_of(counts)[:-1], counts)
    event = starts[subsampled][row] + place
    keys = _keys(config, row, place, timestamps[event], rows[subsampled], counts)
    # Sorted by key within each row, the largest first.
    order = np.lexsort((-keys, row))
    keep[event[order]] = place < max_len
    kept_lengths = lengths.copy()
    kept_lengths[subsampled] = max_len
    return KeptEvents(np.flatnonzero(keep), kept_lengths)


def _keys(
    config: pb.StochasticLength,
    row: np.ndarray,
    place: np.ndarray,
    timestamps: np.ndarray,
    hashes: np.ndarray,
    counts: np.ndarray,
) -> np.ndarray:
    """Draws a float64 key for each event; the events with the largest keys of a row are kept.

    With u uniform, the events with the largest log(u) / w are a weighted draw without replacement with
    weights w (Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006).
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
