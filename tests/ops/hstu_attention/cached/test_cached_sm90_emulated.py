"""The logic of the Hopper kernel of candidates on a CPU, by an emulator: barriers, buffers, who sees whom."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton==3.6.0)")

from recsys.ops import AttentionMask
from recsys.ops.hstu_attention.cached import hopper as cached_hopper_launch
from recsys.ops.hstu_attention.problem import CachedProblem
from tests.ops.hstu_attention.cached.calls import Candidates

pytestmark = pytest.mark.usefixtures("emulated")

SIZES = [*cached_hopper_launch.SIZES.items(), *cached_hopper_launch.LARGE_SIZES.items()]


def check(cached, targets, mask, dim=64, heads=2, contextual=0, sizes=None):
    case = Candidates(cached, targets, dim, heads=heads, contextual=contextual, device="cpu")
    problem = CachedProblem(case.layout, mask, dim**-0.5, 50.0, None, cache_layout=case.cache_layout)
    case.assert_near(cached_hopper_launch.forward(*case.new, *case.cache, problem, sizes), mask)


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
