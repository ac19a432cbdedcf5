"""Candidates cut into pieces: whole target groups, and no more padding than a piece may have."""

import pytest

from recsys import config
from recsys.scoring.pieces import Piece, cut, packed, piece_size

HSTU = "model.ranker.mixer.hstu"
GROUPS = "[{mask {target_group_size: 6}}, {mask {target_group_size: 4}}]"


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ((), 512),
        ((f"{HSTU}.mask.target_group_size=3",), 513),
        ((f"{HSTU}.num_layers=", f"{HSTU}.mask=", f"{HSTU}.layer_groups={GROUPS}"), 516),
    ],
)
def test_a_piece_holds_whole_groups(overrides, size):
    pipeline = config.prepare("tests/integration/tiny.config", overrides).pipeline
    assert piece_size(pipeline, 512) == size


def test_rows_are_cut_into_consecutive_pieces():
    assert cut([5, 0, 4, 9], 4) == [(0, 4), (0, 1), (2, 4), (3, 4), (3, 4), (3, 1)]
    assert cut([], 4) == []


@pytest.mark.parametrize(
    ("counts", "runs"),
    [
        ([], []),
        ([1, 1, 1, 1, 1], [4, 1]),
        ([1, 2, 2, 3, 1, 1], [2, 1, 1, 2]),  # 2 x 2, since 3 x 2 are too many; 3 alone
        ([9, 1], [1, 1]),
    ],
)
def test_pieces_are_packed_by_their_padded_size(counts, runs):
    pieces = [Piece(row, count) for row, count in enumerate(counts)]
    actual = list(packed(pieces, 4))
    assert [len(run) for run in actual] == runs
    assert sum(actual, []) == pieces
