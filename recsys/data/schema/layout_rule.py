"""The rule by which rows become sequences of tokens, which a model's preprocessor gives the reader.

It travels to reader processes, so nothing here imports torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Channel:
    """Selects events of the history that form a sequence of their own.

    Attributes:
        name: name of the channel.
        bits: an event belongs to the channel when `uih_actions & bits` is not 0. With neither bits nor a
            watch time every event belongs to it.
        min_watch_time: seconds; events that were watched for at least as long belong to the channel too.
            None: watch time does not count.
        max_events: how many of a row's events are kept, the newest ones; None keeps all.
    """

    name: str
    bits: int = 0
    min_watch_time: float | None = None
    max_events: int | None = None


@dataclass(frozen=True)
class LayoutRule:
    """Says how rows become sequences; a model's preprocessor decides it, the reader applies it.

    A row with U events and N candidates has num_contextual + tokens_per_event * U (+ N) tokens.

    Attributes:
        num_contextual: tokens in front of each history.
        targets: candidates are tokens of the sequence (ranking); else they are only looked up (retrieval).
        tokens_per_event: history tokens that each event makes.
        channels: the sequences that a row has instead of one; each has the row's contextual tokens and
            candidates.
    """

    num_contextual: int = 0
    targets: bool = True
    tokens_per_event: int = 1
    channels: tuple[Channel, ...] = ()
