"""Defines the rule by which rows become sequences of tokens, which a model's preprocessor gives the reader.

The rule is sent to reader processes, so nothing here imports torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Channel:
    """Selects events of the history that form a sequence of their own.

    Attributes:
        name: name of the channel.
        bits: an event belongs to the channel if `uih_actions & bits` is not 0. With neither `bits` nor
            `min_watch_time`, every event belongs to it.
        min_watch_time: seconds; events that were watched for at least as long belong to the channel too.
            None: watch time does not matter.
        max_events: number of newest events of a row that are kept; None keeps all.
    """

    name: str
    bits: int = 0
    min_watch_time: float | None = None
    max_events: int | None = None


@dataclass(frozen=True)
class LayoutRule:
    """Says how rows become sequences: a model's preprocessor makes the rule, and the reader applies it.

    A row with U events and N candidates has num_contextual + tokens_per_event * U (+ N if `targets`) tokens.

    Attributes:
        num_contextual: number of contextual tokens before each history.
        targets: True if candidates are tokens of the sequence (ranking); else they are only looked up
            (retrieval).
        tokens_per_event: number of history tokens per event.
        channels: if given, a row becomes one sequence per channel instead of a single one; each has the row's
            contextual tokens and candidates.
    """

    num_contextual: int = 0
    targets: bool = True
    tokens_per_event: int = 1
    channels: tuple[Channel, ...] = ()
