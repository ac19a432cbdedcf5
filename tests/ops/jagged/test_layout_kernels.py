"""The kernels for facts of each token against the operations of `SequenceLayout`."""

import random

import pytest
import torch

from recsys.ops import SequenceLayout
from tests.ops.harness import interpreter_test
from tests.tools.interpreter import interpreted


@pytest.fixture
def few_lanes(monkeypatch):
    """Several programs."""
    from recsys.ops.jagged import layout_kernels

    monkeypatch.setattr(layout_kernels, "LANES", 16)


def random_layout(chance: random.Random) -> SequenceLayout:
    contextual, samples = chance.choice([0, 0, 1, 5]), range(chance.randint(0, 6))
    targets = [chance.choice([0, 0, 1, 5, 40]) for _ in samples]
    history = [chance.choice([0, 0, 1, 7, 63, 100]) for _ in samples]
    lengths = [contextual + one + other for one, other in zip(targets, history, strict=True)]
    numbers = (torch.tensor(one, dtype=torch.int64) for one in (lengths, targets))
    return SequenceLayout(*numbers, contextual)


def assert_equal_numbers(seed: int, device: str = "cpu") -> None:
    from recsys.ops.jagged.layout_kernels import source_rows, tokens_of

    chance = random.Random(seed)
    layout = random_layout(chance)
    moved, names = layout.to(device), ("sample_ids", "positions", "assemble_index", "disassemble_index")
    for name, found in zip(names, tokens_of(moved), strict=True):
        assert torch.equal(found.cpu(), getattr(layout, name)()), name
    kept = layout.truncate(chance.choice([0, 1, 8, 70]))
    dropped, first = layout.lengths - kept.layout.lengths, torch.zeros_like(layout.lengths)
    derived = kept.layout.to(device)
    found = source_rows(moved, derived, first.to(device), dropped.to(device))
    assert torch.equal(found.cpu(), kept.index)
    targets = layout.targets_only()
    found = source_rows(moved, targets.layout.to(device), layout.history_end.to(device))
    assert torch.equal(found.cpu(), targets.index)


@interpreted
@pytest.mark.parametrize("seed", range(40))
def test_the_same_numbers(few_lanes, seed):
    assert_equal_numbers(seed)


test_the_kernels_in_the_interpreter = interpreter_test(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_the_same_numbers_on_a_gpu(seed):
    assert_equal_numbers(seed, "cuda")


@pytest.mark.gpu
def test_a_layout_on_a_gpu_derives_the_same():
    """Through its methods, which take the kernels there."""
    for seed in range(20):
        layout = random_layout(random.Random(seed))
        moved = layout.to("cuda")
        for one, other in (
            (moved.truncate(8), layout.truncate(8)),
            (moved.targets_only(), layout.targets_only()),
            (moved.history_only(), layout.history_only()),
            (moved.without_targets(), layout.without_targets()),
            (moved.contextual_only(), layout.contextual_only()),
        ):
            assert torch.equal(one.index.cpu(), other.index)
            assert torch.equal(one.layout.positions().cpu(), other.layout.positions())
            assert torch.equal(one.layout.kinds().cpu(), other.layout.kinds())
        assert torch.equal(moved.assemble_index().cpu(), layout.assemble_index())
