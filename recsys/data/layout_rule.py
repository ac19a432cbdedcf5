"""How rows become sequences of tokens: what a model's preprocessor tells the reader. Knows no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayoutRule:
    """How rows become sequences; a model's preprocessor decides it, the reader applies it.

    A row with U events and N candidates has num_contextual + tokens_per_event * U (+ N) tokens.

    Attributes:
        num_contextual: tokens in front of each history.
        targets: candidates are tokens of the sequence (ranking); else they are only looked up (retrieval).
        tokens_per_event: history tokens that each event makes.
    """

    num_contextual: int = 0
    targets: bool = True
    tokens_per_event: int = 1
