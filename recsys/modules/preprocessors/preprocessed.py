"""Defines the results of preprocessors and the layout of events."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.data.batch import Batch
from recsys.modules.prefix import Prefix
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout, offsets_from_lengths


@dataclass(frozen=True, eq=False)
class Preprocessed:
    """The tokens of a batch, as a preprocessor makes them.

    Attributes:
        sequence: T tokens of width E.
        candidates: [N, E], content of the candidates before the mixer; None if the sequence has no
            candidates.
    """

    sequence: JaggedSequence
    candidates: Tensor | None = None


class EncodedPrefix(NamedTuple):
    """Contextual and history tokens, with the facts about them that candidates need later."""

    sequence: JaggedSequence
    prefix: Prefix


def events_of(batch: Batch, tokens_per_event: int) -> SequenceLayout:
    """Returns the layout of events (not of their tokens): B samples of nothing but history."""
    lengths = batch.uih_lengths
    return SequenceLayout.trusted(
        lengths,
        offsets_from_lengths(lengths),
        torch.zeros_like(lengths),
        num_contextual=0,
        total_len=batch.uih_timestamps.shape[0],
        max_len=batch.layout.history_only().layout.max_len // tokens_per_event,
        total_targets=0,
    )
