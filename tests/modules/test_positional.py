import math

import pytest
import torch

from recsys import protos as pb
from recsys.modules.positional import PositionalEncoder
from recsys.modules.prefix import Prefix
from recsys.ops import SequenceLayout

WIDTH = 4
# c c h h h t t | c c t | c c h : C = 2
LAYOUT = SequenceLayout(torch.tensor([7, 3, 3]), torch.tensor([2, 1, 0]), num_contextual=2)
KINDS = "cchhhtt" + "cct" + "cch"


def encoder(**fields):
    return PositionalEncoder(pb.PositionalEncoder(**fields), embedding_dim=WIDTH)


def encode(module, ages):
    times = torch.full((13,), 1_700_000_000)
    values = torch.randn(13, WIDTH)
    added = module(values, LAYOUT, times, times + torch.tensor(ages)) - values * math.sqrt(WIDTH)
    return added.detach()


def test_from_the_end_the_newest_event_comes_right_before_the_targets():
    module = encoder(num_positions=10)
    # Contextual tokens keep their index, targets have C = 2, events count back from C + 1.
    expected = [0, 1, 5, 4, 3, 2, 2, 0, 1, 2, 0, 1, 3]
    torch.testing.assert_close(encode(module, [0] * 13), module.position.weight.detach()[expected])


def test_from_the_start_positions_do_not_know_what_follows():
    module = encoder(num_positions=10, origin=pb.PositionalEncoder.START)
    expected = [0, 1, 2, 3, 4, 5, 5, 0, 1, 2, 0, 1, 2]
    torch.testing.assert_close(encode(module, [0] * 13), module.position.weight.detach()[expected])


@pytest.mark.parametrize("num_positions", [1, 2, 4, 10])
@pytest.mark.parametrize("origin", [pb.PositionalEncoder.START, pb.PositionalEncoder.END])
@pytest.mark.parametrize("fields", [{}, {"num_time_buckets": 3}, {"num_time_buckets": 1, "time_unit": 9}])
def test_targets_alone_are_those_behind_their_history(fields, origin, num_positions):
    module = encoder(num_positions=num_positions, origin=origin, **fields)
    selection = LAYOUT.targets_only()
    times, values = torch.arange(13) + 1_700_000_000, torch.randn(13, WIDTH)
    whole = module(values, LAYOUT, times, times)[selection.index]
    behind = Prefix((LAYOUT.lengths - LAYOUT.num_targets)[None], LAYOUT.num_contextual, None)
    kept, values = times[selection.index], values[selection.index]
    torch.testing.assert_close(module(values, selection.layout, kept, kept, behind), whole)
    apart = module(values, selection.layout, kept, kept.clone(), behind)  # by the rules for any token
    torch.testing.assert_close(apart, whole)


def test_positions_past_the_table_share_its_last_row():
    module = encoder(num_positions=4)
    expected = [0, 1, 3, 3, 3, 2, 2, 0, 1, 2, 0, 1, 3]
    torch.testing.assert_close(encode(module, [0] * 13), module.position.weight.detach()[expected])


@pytest.mark.parametrize("scale", [pb.PositionalEncoder.SQRT, pb.PositionalEncoder.LOG])
def test_age_chooses_the_time_row_and_contextual_tokens_have_one_of_their_own(scale):
    ages = [0, 10**9, 0, 59, 60, 3600, -5, 10**9, 0, 8 * 60, 60, 60, 10**9]
    buckets = 6
    module = encoder(num_positions=10, num_time_buckets=buckets, time_scale=scale, time_unit=60)

    def bucket(kind, age):
        if kind == "c":
            return buckets
        units = max(age, 0) / 60
        exact = math.sqrt(units) if scale == pb.PositionalEncoder.SQRT else math.log(max(1, units))
        return min(math.floor(exact), buckets - 1)

    rows = [bucket(kind, age) for kind, age in zip(KINDS, ages, strict=True)]
    assert len(set(rows)) >= 4
    position = module.position.weight.detach()[module.positions(LAYOUT)]
    torch.testing.assert_close(encode(module, ages) - position, module.time.weight.detach()[rows])


def test_seconds_count_at_todays_times():
    # In float32, times of today lie 128 s apart.
    module = encoder(
        num_positions=10, num_time_buckets=100, time_scale=pb.PositionalEncoder.SQRT, time_unit=1
    )
    ages = torch.tensor([0, 0, 1, 4, 9, 16, 25, 0, 0, 36, 0, 0, 49])
    request = torch.full((13,), 1_700_000_001)
    buckets = module.time_buckets(LAYOUT, request - (request - ages))
    assert buckets.tolist() == [100, 100, 1, 2, 3, 4, 5, 100, 100, 6, 100, 100, 7]
