"""Requests and histories are cut as loops over the events cut them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys.prepare.rows import holdout_slices, request_slices

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 1)), max_size=40).map(
    lambda events: sorted(events, key=lambda event: event[:2])
)


@given(EVENTS, st.integers(0, 5), st.integers(1, 4), st.integers(1, 6))
def test_request_slices_against_a_loop(events, gap, max_candidates, max_history):
    expected, request = [], []
    for index, (user, time, tab) in enumerate(events):
        last = events[index - 1] if index else None
        fits = request and last[0] == user and last[2] == tab and time - last[1] <= gap
        if not fits or len(request) == max_candidates:
            request = []
            expected.append(request)
        request.append(index)
    user, time, tab = np.array(events, dtype=np.int64).reshape(-1, 3).T
    actual = request_slices(
        user, time, gap=gap, max_candidates=max_candidates, max_history=max_history, apart=(tab,)
    )
    assert [
        list(range(a, b)) for a, b in zip(actual.candidate_start, actual.candidate_end, strict=True)
    ] == expected
    for row, request in enumerate(expected):
        first = events[request[0]]
        before = [i for i, event in enumerate(events) if event[0] == first[0] and event[1] < first[1]]
        history = range(actual.history_start[row], actual.history_end[row])
        assert list(history) == before[-max_history:]


@given(st.lists(st.integers(1, 6), max_size=6), st.sampled_from([1, 2]), st.none() | st.integers(1, 3))
def test_holdout_slices_against_a_loop(lengths, held_out, max_history):
    user = np.repeat(np.arange(len(lengths)), lengths)
    for with_candidate in (False, True):
        expected, start = [], 0
        for length in lengths:
            indices = list(range(start, start + length))
            start += length
            if length >= 3:
                target = [indices[-held_out]] if with_candidate else []
                expected.append((indices[:-held_out][-(max_history or 99) :], target))
            elif not with_candidate:
                expected.append((indices[-(max_history or 99) :], []))
        actual = holdout_slices(
            user, held_out=held_out, with_candidate=with_candidate, max_history=max_history
        )
        rows = [(list(range(a, b)), list(range(c, d))) for a, b, c, d in zip(*actual, strict=True)]
        assert rows == expected
