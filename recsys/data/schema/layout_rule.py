"""How rows become sequences of tokens: what a model's preprocessor tells the reader. Knows no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Channel:
    """Some events of the history as a sequence of their own.

    Attributes:
        name: of the channel.
        bits: an event belongs to it when `uih_actions & bits` is not 0. With neither bits nor a watch time
            every event does.
        min_watch_time: seconds; an event that was watched for at least as long belongs to it too. None: watch
            time does not count.
        max_events: how many of a row's are kept, the newest; None for all.
    """

    name: str
    bits: int = 0
    min_watch_time: float | None = None
    max_events: int | None = None


@dataclass(frozen=True)
class LayoutRule:
    """How rows become sequences; a model's preprocessor decides it, the reader applies it.

    A row with U events and N candidates has num_contextual + tokens_per_event * U (+ N) tokens.

    Attributes:
        num_contextual: tokens in front of each history.
        targets: candidates are tokens of the sequence (ranking); else they are only looked up (retrieval).
        tokens_per_event: history tokens that each event makes.
        channels: sequences that a row has in place of one; each has the row's contextual tokens and
            candidates.
    """

    num_contextual: int = 0
    targets: bool = True
    tokens_per_event: int = 1
    channels: tuple[Channel, ...] = ()
