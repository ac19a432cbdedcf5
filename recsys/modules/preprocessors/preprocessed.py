"""What a preprocessor returns, and how it sees the features of a batch."""

from dataclasses import dataclass

from torch import Tensor

from recsys.data.batch import Batch
from recsys.modules.sequence import JaggedSequence


@dataclass(frozen=True, eq=False)
class Preprocessed:
    """A batch as tokens.

    Attributes:
        sequence: T tokens of width E.
        candidates: [N, E], content of the candidates before mixing; None when they are no part of the
            sequence.
    """

    sequence: JaggedSequence
    candidates: Tensor | None = None


def inputs_of(embeddings: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Column -> [n, width] for embedded and plain numeric columns alike."""
    return embeddings | {name: numbers[:, None] for name, numbers in batch.numbers.items()}
