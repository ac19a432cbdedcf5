"""Cuts events, sorted by user and time, into rows: requests with their histories, or leave-one-out rows.

A history is a run of a user's events, and so are the candidates of a request, so a row is two slices of one
event table. No list is copied before `dataset_writer` writes a row group, so memory does not grow with
histories.
"""

from typing import NamedTuple

import numpy as np


class Slices(NamedTuple):
    """Rows as slices of an event table, four int64 arrays [rows].

    The history is events [history_start, history_end), the candidates are [candidate_start, candidate_end).
    """

    history_start: np.ndarray
    history_end: np.ndarray
    candidate_start: np.ndarray
    candidate_end: np.ndarray

    def take(self, index: np.ndarray) -> "Slices":
        """Selects rows by number."""
        return Slices(*(part[index] for part in self))


def run_starts(*columns: np.ndarray) -> np.ndarray:
    """Returns the start of each element's run of equal values (in all columns at once), int64 [n]."""
    index = np.arange(len(columns[0]), dtype=np.int64)
    new = np.zeros(len(index), dtype=bool)
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.maximum.accumulate(np.where(new, index, 0)) if len(index) else index


def request_slices(
    user: np.ndarray,
    time: np.ndarray,
    *,
    gap: int,
    max_candidates: int,
    max_history: int,
    apart: tuple[np.ndarray, ...] = (),
) -> Slices:
    """Groups one user's neighboring events into requests, each event at most `gap` after the one before it.

    The history of a request is what the user did strictly before its first event.

    Args:
        user: [n], user of each event; a user's events are consecutive and ordered by time.
        time: int64 [n], time of each event, in the unit of `gap`.
        gap: longest pause within a request.
        max_candidates: most candidates in a request; longer requests are cut into several.
        max_history: number of newest events that a history keeps.
        apart: columns [n] that are constant within a request, such as the place in the app or the split.
    """
    count = len(user)
    session = run_starts(user, *apart)
    index = np.arange(count, dtype=np.int64)
    pause = np.zeros(count, dtype=bool)
    pause[1:] = np.diff(time) > gap
    session = np.maximum.accumulate(np.where((session == index) | pause, index, 0)) if count else index
    start = np.flatnonzero((index - session) % max_candidates == 0)
    end = np.append(start[1:], count)[: len(start)]
    history_end = run_starts(user, time)[start]
    history_start = np.maximum(run_starts(user)[start], history_end - max_history)
    return Slices(history_start, history_end, start, end)


def freeze_histories(
    slices: Slices, user: np.ndarray, period: np.ndarray, frozen: np.ndarray, *, max_history: int
) -> Slices:
    """Ends the history of requests in `frozen` periods where the period begins for their user.

    Metrics within users need this. If a user has one positive and one negative, a history that already shows
    the first outcome is evidence against the second: the better a model reads it, the lower its GAUC.

    Args:
        slices: the requests.
        user: [n], user of each event.
        period: [n], period of each event, rising in time; a request never spans two periods.
        frozen: bool [n], the same for all events of a period.
        max_history: number of newest events that a history keeps.
    """
    start = slices.candidate_start
    period_start = run_starts(user, period)[start]
    end = np.where(frozen[start], np.minimum(slices.history_end, period_start), slices.history_end)
    return slices._replace(
        history_start=np.maximum(run_starts(user)[start], end - max_history), history_end=end
    )


def holdout_slices(
    user: np.ndarray, *, held_out: int, with_candidate: bool, max_history: int | None
) -> Slices:
    """Cuts one leave-one-out row per user: all but the last `held_out` events, and the next as candidate.

    No events of a user with fewer than 3 events are held out: all of them are training history, and the user
    has no row with a candidate.
    """
    index = np.arange(len(user), dtype=np.int64)
    first = np.flatnonzero(run_starts(user) == index)
    last = np.append(first[1:], len(user)) if len(first) else first
    is_complete = last - first >= 3
    if with_candidate:
        first, last = first[is_complete], last[is_complete]
        end = last - held_out
        candidate_end = end + 1
    else:
        end = np.where(is_complete, last - held_out, last)
        candidate_end = end
    start = first if max_history is None else np.maximum(first, end - max_history)
    return Slices(start, end, end, candidate_end)


def ranges(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Lists the numbers of [first[0], last[0]), then of [first[1], last[1]), ...; int64."""
    lengths = last - first
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(first - offsets, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
