"""The Hopper kernel of candidates on a GPU: numbers, bits, graphs, who takes what."""

import random

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout, explain, last_backend
from recsys.ops.hstu_attention.cached import WIDTHS
from tests.ops.attention import CAUSAL
from tests.ops.harness import needs_hopper
from tests.ops.hstu_attention.cached.calls import Candidates

pytestmark = [pytest.mark.gpu, needs_hopper]


def check(case, mask=CAUSAL):
    got = case.attend(mask)
    assert last_backend("hstu_attention_cached") == "sm90"
    case.assert_near(got, mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "large"), [(64, False), (64, True), (128, False)])
def test_random_batches_in_any_order(dim, large, dtype, monkeypatch):
    from recsys.ops.hstu_attention.cached import hopper as hopper_launch

    sizes = (hopper_launch.LARGE_SIZES if large else hopper_launch.SIZES)[dim]
    monkeypatch.setattr(hopper_launch, "sizes_for", lambda *_: sizes)
    draw = random.Random(dim)
    for number in range(40):
        rows = draw.randint(1, 9)
        cached = [draw.choice([0, 1, 63, 64, 127, 128, 129, 500, 2000]) for _ in range(rows)]
        targets = [draw.choice([0, 1, 64, 65, 128, 200, 300]) for _ in range(rows)]
        mask = AttentionMask(target_group_size=draw.choice([1, 1, 3, 64, 150]))
        heads = draw.choice([1, 2, 4, 5])
        check(Candidates(cached, targets, dim, dtype, heads, seed=number), mask)


@pytest.mark.parametrize("dim", WIDTHS)
def test_full_size_to_the_same_bits(dim):
    case = Candidates([4098] * 32, [256] * 32, dim, contextual=2)
    check(case)
    expected = case.attend()
    assert all(torch.equal(case.attend(), expected) for _ in range(20))


@pytest.mark.parametrize("times", [4, 40])
def test_replays_of_a_graph(times):
    case = Candidates([1000, 30, 0, 700] * times, [256, 3, 77, 128] * times, 64)
    expected = case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.attend()
    for _ in range(5):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    case.new[0].mul_(-0.5)
    graph.replay()
    assert torch.equal(out, case.attend())


def test_what_it_leaves_to_others():
    case = Candidates([300], [9], 64)
    arguments = (*case.new, case.layout, *case.cache, case.cache_layout)
    said = dict(explain("hstu_attention_cached", *arguments, scale_len=8).rows)["sm90"]
    assert said.ok and not said.auto  # few users
    windowed = AttentionMask(9, target_window=True)
    said = dict(explain("hstu_attention_cached", *arguments, windowed, scale_len=8).rows)["sm90"]
    assert "no window of targets" in said.reason
    history = SequenceLayout(case.layout.lengths)
    arguments = (*case.new, history, *case.cache, case.cache_layout)
    said = dict(explain("hstu_attention_cached", *arguments, scale_len=8).rows)["sm90"]
    assert "history among them" in said.reason
