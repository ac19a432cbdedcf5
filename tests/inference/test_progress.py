"""Lines about the progress of a prediction."""

import logging

from recsys.inference.progress import Progress, duration


def test_speed_and_time_left_count_from_the_start_of_this_process(caplog):
    now, done = [100.0], [4_000]
    with caplog.at_level(logging.INFO, "recsys"):
        progress = Progress(lambda: done[0], 20_000, clock=lambda: now[0])
        now[0], done[0] = 109.0, 5_000
        progress.show()
        assert caplog.messages == ["4,000 of 20,000 rows were done before"]
        # 6,000 rows in 20 s; the other 10,000 take 33.3 s more.
        now[0], done[0] = 120.0, 10_000
        progress.show()
        now[0], done[0] = 129.0, 12_000
        progress.show()
    assert caplog.messages[1:] == ["10,000 of 20,000 rows (50 %), 300 rows/s, 33 s left"]


def test_durations_have_two_units():
    assert [duration(seconds) for seconds in (0, 59.6, 61, 3_661, 90_000)] == [
        "0 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 h 1 min",
        "25 h 0 min",
    ]
