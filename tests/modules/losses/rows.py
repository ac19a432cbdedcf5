"""Rows of candidates for tests of losses."""

import torch

from recsys.ops import SequenceLayout


def rows_of(*lengths: int) -> SequenceLayout:
    """As the model hands them to its losses: candidates only."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    return SequenceLayout(counts, counts)
