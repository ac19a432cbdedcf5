"""The Hopper kernel of candidates on a GPU: numbers, bits, graphs, who takes what."""

import random

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout, explain, hstu_attention_cached, last_backend
from recsys.ops.hstu_attention.cached import hopper

CAUSAL = AttentionMask()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
    ),
]


class Case:
    """Candidates, what is cached, on the GPU; projections as the layers have them, a cache with rows of NaN
    behind it."""

    def __init__(self, cached, targets, dim, dtype=torch.bfloat16, heads=4, contextual=0, seed=0):
        torch.manual_seed(seed)
        targets, cached = torch.tensor(targets), torch.tensor(cached)
        self.layout = SequenceLayout(targets, targets).to("cuda")
        self.cache_layout = SequenceLayout(cached, None, contextual).to("cuda")
        joined = torch.randn(self.layout.total_len, 3 * heads * dim, device="cuda", dtype=dtype)
        self.new = [part.view(-1, heads, dim) for part in joined.split(heads * dim, 1)]
        total = self.cache_layout.total_len
        room = torch.randn(2, total + 300, heads, dim, device="cuda", dtype=dtype)
        room[:, total:] = float("nan")
        self.cache = [room[0, :total], room[1, :total]]

    def attend(self, mask=CAUSAL, backend="sm90", dtype=None):
        new, cache = ([t.to(dtype or t.dtype) for t in some] for some in (self.new, self.cache))
        return hstu_attention_cached(
            *new, self.layout, *cache, self.cache_layout, mask, scale_len=64, backend=backend
        )

    def check(self, mask=CAUSAL):
        """Not further from float64 than twice the reference in the same type."""
        got = self.attend(mask)
        assert last_backend("hstu_attention_cached") == "sm90"
        exact = self.attend(mask, "reference", torch.float64)
        allowed = 2 * (self.attend(mask, "reference").double() - exact).norm()
        assert got.isfinite().all()
        assert (got.double() - exact).norm() <= allowed + 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "large"), [(64, False), (64, True), (128, False)])
def test_random_batches_in_any_order(dim, large, dtype, monkeypatch):
    from recsys.ops.hstu_attention.cached import hopper_launch

    sizes = (hopper_launch.LARGE_SIZES if large else hopper_launch.SIZES)[dim]
    monkeypatch.setattr(hopper_launch, "sizes_for", lambda *_: sizes)
    draw = random.Random(dim)
    for number in range(40):
        rows = draw.randint(1, 9)
        cached = [draw.choice([0, 1, 63, 64, 127, 128, 129, 500, 2000]) for _ in range(rows)]
        targets = [draw.choice([0, 1, 64, 65, 128, 200, 300]) for _ in range(rows)]
        mask = AttentionMask(target_group_size=draw.choice([1, 1, 3, 64, 150]))
        heads = draw.choice([1, 2, 4, 5])
        Case(cached, targets, dim, dtype, heads, seed=number).check(mask)


@pytest.mark.parametrize("dim", hopper.WIDTHS)
def test_full_size_to_the_same_bits(dim):
    case = Case([4098] * 32, [256] * 32, dim, contextual=2)
    case.check()
    expected = case.attend()
    assert all(torch.equal(case.attend(), expected) for _ in range(20))


@pytest.mark.parametrize("times", [4, 40])
def test_replays_of_a_graph(times):
    case = Case([1000, 30, 0, 700] * times, [256, 3, 77, 128] * times, 64)
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
    case = Case([300], [9], 64)
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
