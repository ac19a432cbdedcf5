"""Counters before a period: hand-worked numbers, and the cases in which nothing is known."""

import math

import numpy as np
import polars as pl
import pytest

from recsys.prepare.counters import count_before, counter_names


def frame(period, item, like):
    return pl.DataFrame({"period": period, "item": item, "label_like": like})


def counted(events):
    return count_before(events, key="video", column="item", labels=["like"]).to_dict(as_series=False)


def test_hand_worked_numbers():
    # Before period 2: item 7 was shown 3 times and liked once, item 8 once and not; 1 like in 4, odds 3.
    events = frame([1, 1, 1, 1, 2, 2, 2], [7, 7, 7, 8, 7, 8, 9], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    made = counted(events)
    assert made["video_impressions"] == [0, 0, 0, 0, 3, 1, 0]
    # r = (1 + 5) / (3 + 20) for item 7, r = 5 / 21 for item 8; p = 1 / 4.
    expected = [0, 0, 0, 0, math.log(6 / 17 * 3), math.log(5 / 16 * 3), 0]
    assert made["video_like_lift"] == pytest.approx(expected, abs=1e-6)


def test_the_order_of_events_is_kept_and_does_not_matter():
    random = np.random.default_rng(3)
    events = frame(
        random.integers(0, 6, 300), random.integers(0, 20, 300), random.integers(0, 2, 300).astype(float)
    )
    order = random.permutation(300)
    straight = count_before(events, key="video", column="item", labels=["like"])
    mixed = count_before(events[order], key="video", column="item", labels=["like"])
    assert straight[order].equals(mixed)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_label_that_was_never_or_always_set_says_nothing(label):
    made = counted(frame([1, 1, 2], [7, 8, 7], [label, label, 1 - label]))
    assert made == {"video_impressions": [0, 0, 1], "video_like_lift": [0, 0, 0]}


def test_no_events():
    made = count_before(
        frame([], [], []).cast({"label_like": pl.Float32}), key="video", column="item", labels=["like"]
    )
    assert made.columns == counter_names("video", ["like"]) and made.height == 0
    assert set(made.dtypes) == {pl.Float32}
