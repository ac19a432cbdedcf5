"""Selects the events of a batch that belong to a channel, in the reader processes."""

from typing import NamedTuple

import numpy as np

from recsys.data.convert.column_block import offsets_of
from recsys.data.schema.layout_rule import Channel


class ChannelEvents(NamedTuple):
    """The events of one channel.

    Attributes:
        events: int64 [n], ascending indices among all events of the batch.
        lengths: int64 [rows], events of each row.
    """

    events: np.ndarray
    lengths: np.ndarray


def select(
    channel: Channel, actions: np.ndarray, watch_time: np.ndarray, lengths: np.ndarray
) -> ChannelEvents:
    """Selects the newest events of each row that belong to a channel.

    Args:
        channel: the rule that selects events.
        actions: int64 [events], bitmask.
        watch_time: float32 [events], seconds.
        lengths: int64 [rows], events of each row, oldest first.
    """
    belongs = (actions & channel.bits) != 0
    if channel.min_watch_time is not None:
        belongs |= watch_time >= channel.min_watch_time
    elif not channel.bits:
        belongs = np.ones(len(actions), bool)
    row = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(row[belongs], minlength=len(lengths))
    events = np.flatnonzero(belongs)
    if channel.max_events is None:
        return ChannelEvents(events, counts)
    ends = offsets_of(counts)[1:]
    newest = ends[row[events]] - np.arange(len(events)) <= channel.max_events
    return ChannelEvents(events[newest], np.minimum(counts, channel.max_events))
