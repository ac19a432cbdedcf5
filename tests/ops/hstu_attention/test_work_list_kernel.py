"""The kernel that makes work lists against the operations of `work_list`: interpreted, compiled, on a GPU."""

import random

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.hstu_attention.work_list import _key_work, _row_work
from tests.ops.assembled import assemble
from tests.ops.interpreter import INTERPRETED, interpreted, mend_interpreter, run_interpreted, starts_it

ORDERING = {"LANES": 32, "OTHERS": 256}
TILES = ((128, 64), (64, 128), (128, 128), (16, 32))
FLAGS = [(keys, window) for keys in (True, False) for window in (True, False)]


@pytest.fixture
def few_lanes(monkeypatch):
    """Several programs."""
    from recsys.ops.hstu_attention import work_list_start

    mend_interpreter(monkeypatch)
    for name, value in (("LANES", 16), ("SAMPLES", 2), ("ORDERED", 8), ("OTHERS", 16)):
        monkeypatch.setattr(work_list_start, name, value)


def random_case(chance: random.Random) -> tuple[SequenceLayout, AttentionMask]:
    contextual = chance.choice([0, 0, 1, 3, 6])
    samples = range(chance.randint(0, 6))
    targets = [chance.choice([0, 0, 1, 5, 40, 200]) for _ in samples]
    history = [chance.choice([0, 0, 1, 7, 63, 64, 65, 300, 1000]) for _ in samples]
    lengths = [contextual + one + other for one, other in zip(targets, history, strict=True)]
    mask = AttentionMask(
        window=chance.choice([None, 1, 16, 100]),
        prefix=chance.choice([0, 0, 8, 70]),
        target_window=chance.random() < 0.3,
        target_group_size=chance.choice([1, 1, 4]),
        contextual_reads_history=chance.random() < 0.5,
    )
    numbers = (torch.tensor(one, dtype=torch.int64) for one in (lengths, targets))
    return SequenceLayout(*numbers, contextual), mask


def assert_equal_lists(seed: int, device: str = "cpu") -> None:
    from recsys.ops.hstu_attention.work_list_start import items_of

    chance = random.Random(seed)
    layout, mask = random_case(chance)
    tile, block = chance.choice(TILES)
    section, tail = chance.choice([None, 500]), chance.choice([None, 0, 1, 64, 200])
    for keys, expected in ((False, _row_work), (True, _key_work)):
        wanted = expected(mask, layout, tile, block, section, tail)
        found = items_of(mask, layout.to(device), tile, block, section, tail, keys=keys)
        assert torch.equal(found.cpu(), wanted), (mask, layout.lengths, layout.num_targets, keys, tail)


@interpreted
@pytest.mark.parametrize("seed", range(60))
def test_the_same_lists(few_lanes, seed):
    assert_equal_lists(seed)


@interpreted
def test_tiles_that_are_none_come_last(few_lanes):
    """Where the lengths are on the device only, there may be fewer than there are items."""
    from recsys.ops.hstu_attention.work_list_start import items_of

    layout = SequenceLayout(torch.tensor([30, 0, 70]), torch.tensor([5, 0, 0]), 0)
    numbers = (layout.lengths, layout.offsets, layout.num_targets)
    unknown = SequenceLayout.trusted(*numbers, 0, layout.total_len, 100, 5).to("cpu")
    known = items_of(AttentionMask(), layout, 16, 32, None, keys=False)
    assert torch.equal(items_of(AttentionMask(), unknown, 16, 32, None, keys=False)[: len(known)], known)


@interpreted
def test_a_long_list_is_sorted(few_lanes, monkeypatch):
    """In the same order as the kernel's, which compares each tile with each."""
    from recsys.ops.hstu_attention import work_list_start

    for seed in range(5):
        monkeypatch.setattr(work_list_start, "MOST_COMPARED", 0)
        assert_equal_lists(seed)


@starts_it
def test_the_kernel_in_the_interpreter():
    run_interpreted(__file__)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize(("keys", "window"), FLAGS)
def test_it_fits_into_the_registers(keys, window, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")
    from recsys.ops.hstu_attention.work_list_kernel import items_kernel, order_kernel

    constants = {"KEYS": keys, "TILE": 128, "BLOCK": 64, "SECTIONED": not window, "WINDOWED": window}
    constants |= {
        "TARGET_WINDOW": window,
        "CONTEXTUAL_READS": True,
        "TAIL": window,
        "LANES": 128,
        "SAMPLES": 32,
    }
    assert assemble(items_kernel, {}, constants, tmp_path).spills == 0
    assert assemble(order_kernel, {}, ORDERING, tmp_path).spills == 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(100))
def test_the_same_lists_on_a_gpu(seed):
    assert_equal_lists(seed, "cuda")
