"""Cuts the candidates of rows into pieces and decides which pieces are scored together."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from recsys import protos as pb
from recsys.config.checks.walk import descend


class Piece(NamedTuple):
    """Consecutive candidates of a row: the row's index and the number of candidates."""

    row: int
    count: int


def group_size(pipeline: pb.Pipeline) -> int:
    """Returns the number of consecutive candidates that can only be scored together in any layer."""
    masks = (message for message, _ in descend(pipeline.model) if isinstance(message, pb.AttentionMask))
    return math.lcm(*(mask.target_group_size for mask in masks))


def piece_size(pipeline: pb.Pipeline, least: int) -> int:
    """Rounds a number of candidates up so that no target group of any layer is split."""
    group = group_size(pipeline)
    return -(-least // group) * group


def cut(counts: Sequence[int], size: int) -> list[Piece]:
    """Cuts rows with `counts` candidates into pieces of at most `size`; rows without candidates have none."""
    return [
        Piece(row, min(count - start, size))
        for row, count in enumerate(counts)
        for start in range(0, count, size)
    ]


def packed(pieces: Sequence[Piece], size: int) -> Iterator[list[Piece]]:
    """Yields runs of consecutive pieces that, padded to the longest piece, fit into `size` candidates."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (len(run) + 1) * max(piece.count, *(earlier.count for earlier in run)) > size:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
