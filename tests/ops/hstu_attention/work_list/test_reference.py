"""The work lists against the dense table of who sees whom: each pair is visited once, and little else."""

import itertools
from collections import Counter

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.hstu_attention.work_list import cached_work, key_work, row_work
from recsys.ops.hstu_attention.work_list.reference import (
    CACHE_LENGTH,
    CACHE_START,
    COUNT_A,
    COUNT_B,
    COUNT_C,
    FIRST,
    HISTORY_END,
    LENGTH,
    NEW,
    PART,
    PART_FIRST,
    PART_LENGTH,
    START,
    START_B,
    START_C,
    UNMASKED_AT,
    UNMASKED_COUNT,
    UNMASKED_START,
)
from tests.ops.cases import MASKS, cut, layout_of, samples
from tests.ops.oracle import table

SHAPES = [(9, 5), (0, 3), (0, 0), (23, 0), (2, 9), (14, 4)]
MORE_MASKS = [AttentionMask(window=6, target_group_size=3), AttentionMask(9, prefix=5, target_window=True)]


def visited(item) -> list[tuple[int, bool]]:
    """The blocks of an item in the order of their numbers, and whether the mask is applied to them."""
    blocks = [
        *range(item[COUNT_A]),
        *range(item[START_B], item[START_B] + item[COUNT_B]),
        *range(item[START_C], item[START_C] + item[COUNT_C]),
    ]
    free = range(item[UNMASKED_AT], item[UNMASKED_AT] + item[UNMASKED_COUNT])
    assert [blocks[number] for number in free] == [
        *range(item[UNMASKED_START], item[UNMASKED_START] + item[UNMASKED_COUNT])
    ]
    return [(block, number not in free) for number, block in enumerate(blocks)]


def is_read(sample, token: int, tail: int | None) -> bool:
    """Return True if the result of a token is read."""
    return tail is None or not sample.contextual <= token < sample.contextual + sample.uih - tail


SOME_MASKS = [*MASKS[::2], *MASKS[1::6], *MORE_MASKS]


TAILS = [(None, None), (0, None), (3, None), (9, None), (None, 2), (3, 2), (9, 4)]
CASES = [
    (mask, 5 * ((i + j) % 2), *TAILS[(i + 3 * j) % 7]) for i, mask in enumerate(SOME_MASKS) for j in range(3)
]


@pytest.mark.parametrize(("mask", "contextual", "tail", "strip"), CASES, ids=str)
def test_every_visible_pair_is_visited_once_and_unmasked_blocks_need_no_mask(mask, contextual, tail, strip):
    """With a tail, every pair whose row is read; and a tile of keys has something to visit all the same.

    Every setting of a mask meets every tail and strip, with and without contextual tokens.
    """
    batch = samples(contextual, SHAPES)
    layout = layout_of(batch)
    for (tile, block), by_rows in itertools.product([(8, 4), (4, 8), (16, 2)], [True, False]):
        strips = {"strip": strip} if by_rows else {}
        items = (row_work if by_rows else key_work)(mask, layout, tile, block, tail=tail, **strips).tolist()
        covered = Counter()
        for item in items:
            number = layout.offsets.tolist().index(item[START])
            number += [sample.length > 0 for sample in batch[number:]].index(True)
            sample = batch[number]
            assert item[LENGTH] == sample.length
            assert item[HISTORY_END] == sample.contextual + sample.uih
            sees = table(sample, mask)
            tokens = range(max(item[FIRST], 0), min(item[FIRST] + tile, sample.length))
            assert visited(item) and tokens
            if by_rows and strip:  # as many strips as there are rows for, and only the last is cut short
                assert item[FIRST] % strip == 0 and item[FIRST] > -tile
                assert (item[FIRST] + tile - sample.length) % tile < strip or tokens.stop < sample.length
            assert not (by_rows and tail) or any(is_read(sample, i, tail) for i in tokens)
            for at, masked in visited(item):
                others = range(at * block, min((at + 1) * block, sample.length))
                pairs = [
                    (token, partner) if by_rows else (partner, token)
                    for token in tokens
                    for partner in others
                ]
                seen = [sees[i][j] for i, j in pairs]
                assert masked or all(seen)
                if not masked and by_rows:  # keys past the end are not masked away there
                    assert (at + 1) * block <= sample.length
                covered.update((number, i, j) for i, j in pairs)
        assert not covered or max(covered.values()) == 1
        for number, sample in enumerate(batch):
            sees = table(sample, mask)
            for i, j in itertools.product(range(sample.length), repeat=2):
                needed = sees[i][j] and is_read(sample, i, tail)
                assert covered[number, i, j] or not needed


def test_a_tail_leaves_out_tiles_of_rows_and_blocks_that_keys_would_visit():
    layout = SequenceLayout(torch.tensor([2 + 4096 + 32]), torch.tensor([32]), 2)
    for mask in (AttentionMask(), AttentionMask(window=256, prefix=64)):
        rows, keys = (
            [work(mask, layout, 128, 64, tail=tail)[:, [COUNT_A, COUNT_B, COUNT_C]] for tail in (None, 512)]
            for work in (row_work, key_work)
        )
        # Tiles of 512 + 32 rows, and the one with contextual tokens.
        assert [len(items) for items in rows] == [33, 6]
        assert [len(items) for items in keys] == [33, 33]
        assert int(keys[1].sum()) < 0.75 * int(keys[0].sum())
        assert bool((keys[1][:, 0] > 0).all())  # contextual tokens look at all history


@pytest.mark.parametrize(
    ("mask", "contextual"),
    [(mask, 5 * (i.bit_count() % 2)) for i, mask in enumerate(SOME_MASKS)],
    ids=str,
)
def test_with_a_cache_new_rows_visit_the_keys_of_both(mask, contextual):
    batch = samples(contextual, SHAPES)
    kept_of_all = ([5, 0, 0, 20, 2, 11], [0] * 6, [99] * 6)
    sizes = [(8, 4), (16, 2)]
    for (tile, block), num_cached, num_parts in itertools.product(sizes, kept_of_all, (1, 2, 4)):
        parts = cut(batch, num_cached)
        starts = parts.layout.offsets.tolist()
        covered = Counter()
        items = cached_work(mask, parts.layout, parts.cache_layout, tile, block, num_parts).tolist()
        assert Counter(item[PART] for item in items) == dict.fromkeys(
            range(num_parts if items else 0), len(items) // num_parts
        )
        for item in items:
            number = starts.index(item[START])
            number += [length > 0 for length in parts.layout.lengths.tolist()[number:]].index(True)
            sample, kept = batch[number], item[CACHE_LENGTH]
            sees = table(sample, mask)
            assert kept == parts.cache_layout.lengths[number] and item[LENGTH] == sample.length - kept
            assert item[CACHE_START] == parts.cache_layout.offsets[number]
            assert 0 <= item[PART_FIRST] <= item[PART_FIRST] + item[PART_LENGTH] <= kept
            cached = (item, item[PART_FIRST], item[PART_LENGTH])
            assert item[HISTORY_END] == sample.contextual + sample.uih
            rows = range(kept + item[FIRST], min(kept + item[FIRST] + tile, sample.length))
            for columns, first, length in (cached, (item[NEW:], kept, item[LENGTH])):
                for at, masked in visited(columns):
                    inside = range(at * block, min((at + 1) * block, length))
                    pairs = [(i, first + j) for i in rows for j in inside]
                    assert masked or (len(inside) == block and all(sees[i][j] for i, j in pairs))
                    covered.update((number, *pair) for pair in pairs)
        assert not covered or max(covered.values()) == 1
        for number, sample in enumerate(batch):
            sees = table(sample, mask)
            rows = range(int(parts.cache_layout.lengths[number]), sample.length)
            for i, j in itertools.product(rows, range(sample.length)):
                assert covered[number, i, j] or not sees[i][j]


def test_candidates_need_the_mask_among_themselves_only():
    """256 of them on 4096 cached tokens. With a window for targets only few of those count."""
    targets = torch.tensor([256])
    layout, cached = SequenceLayout(targets, targets), SequenceLayout(torch.tensor([4096]))
    items = cached_work(AttentionMask(), layout, cached, 128, 128)
    assert items[:, COUNT_A].tolist() == items[:, UNMASKED_COUNT].tolist() == [32, 32]
    assert items[:, NEW + UNMASKED_COUNT].tolist() == [0, 0]
    near = cached_work(AttentionMask(256, prefix=64, target_window=True), layout, cached, 128, 128)
    assert (near[:, COUNT_A] + near[:, COUNT_B]).tolist() == [3, 3]


def test_the_longest_tiles_come_first_and_there_are_no_empty_ones():
    layout = layout_of(samples(0, [(3, 0), (40, 0), (0, 0), (17, 2)]))
    items = row_work(AttentionMask(), layout, 8, 8)
    work = items[:, [COUNT_A, COUNT_B, COUNT_C]].sum(1).tolist()
    assert work == sorted(work, reverse=True) and min(work) > 0
    assert len(items) == 1 + 5 + 0 + 3


def test_tiles_in_strips_have_no_empty_strip_where_rows_see_most():
    layout = SequenceLayout(torch.tensor([500, 192, 60, 0]))  # 8, 3, 1 and no strips of 64 rows
    items = row_work(AttentionMask(), layout, 192, 64, strip=64)
    tiles = [(item[LENGTH], item[FIRST], item[COUNT_A]) for item in items.tolist()]
    assert tiles == [(500, 320, 8), (500, 128, 5), (192, 0, 3), (500, -64, 2), (60, -128, 1)]
    assert torch.equal(
        row_work(AttentionMask(), layout, 64, 64, strip=64), row_work(AttentionMask(), layout, 64, 64)
    )


def test_the_last_two_sections_are_worked_on_together():
    """Seven samples in sections of two: the last section has three, whose longest tiles come first."""
    layout = SequenceLayout(torch.full((7,), 24))
    items = row_work(AttentionMask(), layout, 8, 8, section=48)
    samples_of = (items[:, START] // 24).tolist()
    assert samples_of == [0, 1] * 3 + [2, 3] * 3 + [4, 5, 6] * 3
    assert items[:, COUNT_A].tolist() == [3, 3, 2, 2, 1, 1] * 2 + [3] * 3 + [2] * 3 + [1] * 3
    alone = row_work(AttentionMask(), layout, 8, 8, section=1000)
    assert alone[:, COUNT_A].tolist() == [3] * 7 + [2] * 7 + [1] * 7


def test_work_grows_with_the_window_not_with_the_length():
    layout = SequenceLayout(torch.tensor([4096]))
    items = row_work(AttentionMask(window=128, prefix=16), layout, 64, 64)
    work = items[:, [COUNT_A, COUNT_B, COUNT_C]].sum(1)
    assert work.max() == 4  # the prefix, and 64 + 128 - 1 keys that touch three blocks
    full = row_work(AttentionMask(), layout, 64, 64)
    assert int(full[:, COUNT_A].sum()) == 64 * 65 // 2
    # Without a window only the blocks on the diagonal need the mask.
    assert int((full[:, COUNT_A] - full[:, UNMASKED_COUNT]).sum()) == 64


def test_an_unknown_number_of_tiles_is_bounded(monkeypatch):
    """A layout whose lengths are only on the device: the list is filled up with items of length 0."""
    known = layout_of(samples(1, SHAPES))
    unknown = layout_of(samples(1, SHAPES))
    items = [work(AttentionMask(), known, 8, 8) for work in (row_work, key_work)]
    monkeypatch.setattr(SequenceLayout, "host_copy", None)
    bounded = [work(AttentionMask(), unknown, 8, 8) for work in (row_work, key_work)]
    for exact, longer in zip(items, bounded, strict=True):
        assert len(longer) == known.total_len // 8 + known.batch_size
        assert torch.equal(longer[: len(exact)], exact)
        rest = longer[len(exact) :]
        assert not rest[:, [LENGTH, COUNT_A, COUNT_B, COUNT_C, UNMASKED_COUNT]].any()


def test_an_unknown_number_of_tiles_is_bounded_with_a_cache_too(monkeypatch):
    cuts = [cut(samples(1, SHAPES), [5, 0, 0, 20, 2, 11]) for _ in range(2)]
    exact = cached_work(AttentionMask(), cuts[0].layout, cuts[0].cache_layout, 8, 8)
    monkeypatch.setattr(SequenceLayout, "host_copy", None)
    longer = cached_work(AttentionMask(), cuts[1].layout, cuts[1].cache_layout, 8, 8)
    assert len(longer) == cuts[0].layout.total_len // 8 + cuts[0].layout.batch_size
    assert torch.equal(longer[: len(exact)], exact) and not longer[len(exact) :].any()


def test_layers_share_one_list():
    layout = layout_of(samples(1, SHAPES))
    assert row_work(AttentionMask(), layout, 8, 8) is row_work(AttentionMask(), layout, 8, 8)
    assert row_work(AttentionMask(window=3), layout, 8, 8) is not row_work(AttentionMask(), layout, 8, 8)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_a_batch_without_tokens_has_no_work(lengths):
    layout = SequenceLayout(torch.tensor(lengths, dtype=torch.int64))
    assert len(row_work(AttentionMask(), layout, 8, 8)) == 0
    assert len(key_work(AttentionMask(), layout, 8, 8)) == 0
    assert len(cached_work(AttentionMask(), layout, layout, 8, 8)) == 0
