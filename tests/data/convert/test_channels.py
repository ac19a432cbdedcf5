"""Channels of a history, against a loop over the events."""

import numpy as np
import pytest

from recsys.data.convert.channels import select
from recsys.data.schema.layout_rule import Channel

LENGTHS = [0, 5, 1, 0, 12, 3]
CHANNELS = [
    Channel("all"),
    Channel("newest", max_events=2),
    Channel("clicks", bits=1),
    Channel("clicks or likes", bits=0b1001, max_events=3),
    Channel("watched", min_watch_time=10.0),
    Channel("clicked or watched", bits=1, min_watch_time=10.0, max_events=1),
    Channel("nothing", bits=1 << 40),
    Channel("everything, being at least 0 s", min_watch_time=0.0),
]


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_newest_events_that_belong(channel: Channel) -> None:
    generator = np.random.default_rng(3)
    actions = generator.integers(0, 16, sum(LENGTHS))
    seconds = generator.uniform(0, 20, sum(LENGTHS)).astype(np.float32)
    events, lengths, start = [], [], 0
    for count in LENGTHS:
        mine = []
        for event in range(start, start + count):
            by_bits = any(actions[event] >> bit & 1 and channel.bits >> bit & 1 for bit in range(63))
            by_time = channel.min_watch_time is not None and seconds[event] >= channel.min_watch_time
            if by_bits or by_time or (not channel.bits and channel.min_watch_time is None):
                mine.append(event)
        if channel.max_events is not None:
            mine = mine[-channel.max_events :]
        events += mine
        lengths.append(len(mine))
        start += count
    actual = select(channel, actions, seconds, np.array(LENGTHS))
    assert actual.events.tolist() == events
    assert actual.lengths.tolist() == lengths
    assert actual.events.dtype == actual.lengths.dtype == np.int64


def test_no_rows() -> None:
    nothing = np.zeros(0, np.int64)
    actual = select(Channel("clicks", bits=1, max_events=2), nothing, np.zeros(0, np.float32), nothing)
    assert len(actual.events) == len(actual.lengths) == 0
