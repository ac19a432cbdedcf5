"""Random sequences with a layout, for tests of mixers."""

import torch

from recsys.modules.sequence import JaggedSequence
from tests.ops.cases import layout_of, samples, times

WIDTH = 6
CONTEXTUAL = 2


def random_sequence(shapes, *, contextual=CONTEXTUAL, dtype=torch.float64, seed=0) -> JaggedSequence:
    """Samples of (history, targets) tokens of width 6, spread over time."""
    layout = layout_of(samples(contextual, shapes))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.total_len, WIDTH, generator=generator, dtype=dtype)
    return JaggedSequence(values, layout, *times(layout.total_len, seed))


def part(sequence: JaggedSequence, shapes, number: int) -> JaggedSequence:
    """One sample of `random_sequence(shapes)`, alone."""
    contextual = sequence.layout.num_contextual
    start, end = sequence.layout.offsets[number : number + 2].tolist()
    layout = layout_of(samples(contextual, shapes[number : number + 1]))
    columns = (sequence.values, sequence.timestamps, sequence.next_timestamps)
    values, timestamps, next_timestamps = (column[start:end] for column in columns)
    return JaggedSequence(values, layout, timestamps, next_timestamps)
