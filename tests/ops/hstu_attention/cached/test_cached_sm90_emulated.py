"""The logic of the Hopper kernel of candidates on a CPU, by an emulator: barriers, buffers, who sees whom."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.hstu_attention.cached import hopper_launch as cached_hopper_launch
from recsys.ops.hstu_attention.cached import reference
from recsys.ops.hstu_attention.problem import CachedProblem
from tests.ops import harness

pytestmark = pytest.mark.usefixtures("emulated")

SIZES = [*cached_hopper_launch.SIZES.items(), *cached_hopper_launch.LARGE_SIZES.items()]


def check(cached, targets, mask, dim=64, heads=2, contextual=0, sizes=None):
    """Not further from float64 than twice the reference in bfloat16."""
    targets, cached = torch.tensor(targets), torch.tensor(cached)
    layout, cache_layout = SequenceLayout(targets, targets), SequenceLayout(cached, None, contextual)
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(layout.total_len, 3 * heads * dim, generator=generator).to(torch.bfloat16)
    q, k, v = (part.view(-1, heads, dim) for part in new.split(heads * dim, 1))
    room = torch.randn(2, cache_layout.total_len + 9, heads, dim, generator=generator).to(torch.bfloat16)
    room[:, cache_layout.total_len :] = float("nan")
    cache_k, cache_v = room[:, : cache_layout.total_len]
    problem = CachedProblem(layout, mask, dim**-0.5, 50.0, None, cache_layout=cache_layout)
    got = cached_hopper_launch.forward(q, k, v, cache_k, cache_v, problem, sizes)
    theirs, exact = (
        reference.run(*(t.to(dtype) for t in (q, k, v, cache_k, cache_v)), problem)
        for dtype in (torch.bfloat16, torch.float64)
    )
    harness.assert_as_near([got], [theirs], [exact], floor=1e-3)


@pytest.mark.parametrize(("dim", "sizes"), [SIZES[0], SIZES[2]])
@pytest.mark.parametrize("group", [1, 3, 200])
def test_ragged_samples(group, dim, sizes):
    cached, targets = [300, 0, 0, 129, 64, 5, 700, 1], [130, 3, 0, 0, 64, 65, 1, 257]
    check(cached, targets, AttentionMask(target_group_size=group), dim, sizes=sizes)


@pytest.mark.parametrize(("dim", "sizes"), SIZES)
@pytest.mark.parametrize("targets", [1, 63, 64, 65, 128, 129, 300])
def test_one_sample(targets, dim, sizes):
    check([257], [targets], AttentionMask(), dim, heads=1, sizes=sizes)


def test_a_window_of_the_history_is_no_matter_of_targets():
    check([200, 40], [70, 9], AttentionMask(window=7, prefix=2, target_group_size=2), contextual=3)
