"""The dense mask and the counts of pairs against the table."""

import pytest
import torch

from recsys.ops import AttentionMask
from recsys.ops.jagged.mask import count_pairs, dense_mask, key_intervals
from tests.ops.cases import MASKS, layout_of, samples
from tests.ops.harness import refused
from tests.ops.oracle import sees


@pytest.mark.parametrize("contextual", [0, 1, 3])
@pytest.mark.parametrize("mask", MASKS[::5], ids=str)
def test_the_dense_mask_is_the_table(mask, contextual):
    """`hstu_attention/test_mask_forms.py` compares the rule itself for all masks."""
    batch = samples(contextual)
    layout = layout_of(batch)
    dense = dense_mask(mask, layout)
    assert dense.shape == (len(batch), layout.max_len, layout.max_len) and dense.dtype == torch.bool
    for sample, got in zip(batch, dense.tolist(), strict=True):
        for i in range(layout.max_len):
            for j in range(layout.max_len):
                inside = max(i, j) < sample.length
                assert got[i][j] == (inside and sees(sample, i, j, mask)), (sample, i, j)


def test_intervals_of_a_batch_are_those_of_its_samples():
    """The rows of samples follow one another; ascending and disjoint."""
    mask, batch = AttentionMask(3, 2, True, 2), samples(1)
    intervals = zip(*(part.tolist() for part in key_intervals(mask, layout_of(batch))), strict=True)
    rows = [(sample, i) for sample in batch for i in range(sample.length)]
    for (sample, i), (start, end) in zip(rows, intervals, strict=True):
        listed = [j for a, b in zip(start, end, strict=True) for j in range(a, b)]
        assert listed == [j for j in range(sample.length) if sees(sample, i, j, mask)], (sample, i)


@pytest.mark.parametrize("contextual", [0, 3])
@pytest.mark.parametrize("mask", MASKS[::2] + MASKS[1::6], ids=str)
def test_the_number_of_pairs_is_that_of_the_table(mask, contextual):
    batch = samples(contextual)
    places = [(sample, i, j) for sample in batch for i in range(sample.length) for j in range(sample.length)]
    expected = sum(sees(sample, i, j, mask) for sample, i, j in places)
    assert count_pairs(mask, layout_of(batch)) == expected
    for tail in (0, 2, 50):
        read = [(s, i, j) for s, i, j in places if not s.contextual <= i < s.contextual + s.uih - tail]
        expected = sum(sees(sample, i, j, mask) for sample, i, j in read)
        assert count_pairs(mask, layout_of(batch), tail) == expected
    assert count_pairs(mask, layout_of([])) == 0


def test_pairs_are_counted_on_the_host():
    layout = layout_of(samples(1, [(5, 2)])).to("meta")
    assert count_pairs(AttentionMask(), layout) == 6 + 5 + 15 + 2 * 7


def test_a_small_case_written_out():
    """C = 1, five events, two targets; window 2, prefix 1: semi-local attention, drawn by hand."""
    layout = layout_of(samples(1, [(5, 2)]))
    drawn = """
        x x x x x x . .
        x x . . . . . .
        x x x . . . . .
        x x x x . . . .
        x x . x x . . .
        x x . . x x . .
        x x . . x x x .
        x x . . x x . x
    """
    expected = [[mark == "x" for mark in line.split()] for line in drawn.strip().splitlines()]
    assert dense_mask(AttentionMask(window=2, prefix=1, target_window=True), layout)[0].tolist() == expected


WRONG = [
    ({"window": 0}, ValueError, "window must be >= 1, got 0"),
    ({"window": 2.0}, TypeError, "window must be an int or None, got float"),
    ({"prefix": -1}, ValueError, "prefix must be >= 0, got -1"),
    ({"prefix": None}, TypeError, "prefix must be an int, got NoneType"),
    ({"target_group_size": 0}, ValueError, "target_group_size must be >= 1, got 0"),
    ({"target_group_size": True}, TypeError, "target_group_size must be an int, got bool"),
    ({"target_window": 4}, TypeError, "target_window must be a bool, got int"),
    ({"contextual_reads_history": None}, TypeError, "contextual_reads_history must be a bool, got NoneType"),
]

test_wrong_fields_are_named = refused(AttentionMask, dict, WRONG)


def test_equal_masks_are_equal_and_hash_alike():
    assert AttentionMask(window=3) == AttentionMask(window=3) != AttentionMask(window=4)
    assert len({AttentionMask(), AttentionMask(None, 0, False, 1, True)}) == 1
