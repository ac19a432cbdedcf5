"""The kernels that make work lists against `reference`: interpreted, compiled, on a GPU."""

import random

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.hstu_attention.work_list import reference
from tests.ops.harness import interpreter_test, runners
from tests.tools.interpreter import interpreted

TILES = ((128, 64), (192, 64), (64, 128), (128, 128), (16, 32))


FEW = {"LANES": 16, "CACHED_LANES": 16, "SAMPLES": 2, "ORDERED": 8, "COMPARED": 16}
SMALL = {"hstu_attention.work_list.kernels": FEW}
"""Several programs in the interpreter."""


def random_case(chance: random.Random) -> tuple[SequenceLayout, AttentionMask]:
    contextual = chance.choice([0, 0, 1, 3, 6])
    samples = range(chance.randint(0, 6))
    targets = [chance.choice([0, 0, 1, 5, 40, 200]) for _ in samples]
    history = [chance.choice([0, 0, 1, 7, 63, 64, 65, 300, 1000]) for _ in samples]
    lengths = [
        contextual + num_targets + num_events
        for num_targets, num_events in zip(targets, history, strict=True)
    ]
    mask = AttentionMask(
        window=chance.choice([None, 1, 16, 100]),
        prefix=chance.choice([0, 0, 8, 70]),
        target_window=chance.random() < 0.3,
        target_group_size=chance.choice([1, 1, 4]),
        contextual_reads_history=chance.random() < 0.5,
    )
    numbers = (torch.tensor(counts, dtype=torch.int64) for counts in (lengths, targets))
    return SequenceLayout(*numbers, contextual), mask


def assert_equal_lists(seed: int, where: str = "cpu") -> None:
    from recsys.ops.hstu_attention.work_list import kernels as device

    chance = random.Random(seed)
    layout, mask = random_case(chance)
    tile, block = chance.choice(TILES)
    section, tail = chance.choice([None, 500]), chance.choice([None, 0, 1, 64, 200])
    strip = chance.choice([None, 16, tile // 2])
    for name, strips in (("row_work", (strip,)), ("key_work", ())):
        tiling = reference.Tiling(tile, block, section, tail, *strips)
        expected = getattr(reference, name)(mask, layout, tiling)
        items = getattr(device, name)(mask, layout.to(where), tiling)
        assert torch.equal(items.cpu(), expected), (mask, layout.lengths, layout.num_targets, name, tail)


def assert_equal_cached_lists(seed: int, where: str = "cpu") -> None:
    """New tokens behind cached ones: history and targets, some samples without either."""
    from recsys.ops.hstu_attention.work_list import kernels as device

    chance = random.Random(seed)
    whole, mask = random_case(chance)
    history = [chance.choice([0, 0, 1, 50]) for _ in range(whole.batch_size)]
    layout = SequenceLayout(whole.num_targets + torch.tensor(history, dtype=torch.int64), whole.num_targets)
    cached = SequenceLayout(whole.lengths - whole.num_targets, None, whole.num_contextual)
    tile, block = chance.choice(TILES)
    parts = chance.choice([1, 1, 2, 8])
    expected = reference.cached_work(mask, layout, cached, tile, block, parts)
    items = device.cached_work(mask, layout.to(where), cached.to(where), tile, block, parts)
    assert torch.equal(items.cpu(), expected), (mask, layout.lengths, cached.lengths, parts)


@pytest.mark.parametrize("compare", [assert_equal_lists, assert_equal_cached_lists])
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("runner", runners("triton"))
def test_the_same_lists(compare, seed, runner):
    for number in (seed,) if runner.is_interpreted else range(4 * seed, 4 * seed + 4):
        compare(number, runner.device)


@interpreted
def test_tiles_that_are_none_come_last():
    """If only the device knows the lengths, there may be fewer tiles than items."""
    from recsys.ops.hstu_attention.work_list import kernels as device

    layout = SequenceLayout(torch.tensor([30, 0, 70]), torch.tensor([5, 0, 0]), 0)
    numbers = (layout.lengths, layout.offsets, layout.num_targets)
    unknown = SequenceLayout.trusted(*numbers, 0, layout.total_len, 100, 5).to("cpu")
    lists = [device.row_work(AttentionMask(), given, reference.Tiling(16, 32)) for given in (layout, unknown)]
    assert torch.equal(lists[1][: len(lists[0])], lists[0])


@interpreted
def test_tiles_that_are_none_of_candidates():
    """All columns, as the operations have them."""
    from recsys.ops.hstu_attention.work_list import kernels as device

    lengths = torch.tensor([30, 0, 70])
    layout = SequenceLayout.trusted(
        lengths, torch.tensor([0, 30, 30, 100]), lengths, 0, total_len=200, max_len=200, total_targets=200
    )
    cached = SequenceLayout(torch.tensor([5, 9, 0]), None, 0)
    cached = SequenceLayout.trusted(cached.lengths, cached.offsets, cached.num_targets, 0, 999, 999, 0)
    items = device.cached_work(AttentionMask(), layout, cached, 16, 32, 2)
    assert torch.equal(items, reference.cached_work(AttentionMask(), layout, cached, 16, 32, 2))


@interpreted
def test_a_long_list_is_sorted(monkeypatch):
    """In the same order as the kernel's, which compares each tile with each."""
    from recsys.ops.hstu_attention.work_list import kernels as device

    for seed in range(5):
        monkeypatch.setattr(device, "MOST_COMPARED", 0)
        assert_equal_lists(seed)


test_the_kernel_in_the_interpreter = interpreter_test(__file__)
