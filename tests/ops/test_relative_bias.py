"""Time buckets at their exact edges, places of targets, and what the tables may be."""

from decimal import Decimal

import torch

from recsys.ops import RelativeBias
from recsys.ops.relative_bias import relative_positions, time_bucket
from tests.ops.harness import refused


def first_second(bucket: int) -> int:
    """The smallest x with log(x) / 0.301 >= bucket, in decimals of 28 digits."""
    edge = (Decimal("0.301") * bucket).exp()
    return int(edge.to_integral_value(rounding="ROUND_CEILING"))


def test_buckets_change_at_the_exact_second():
    """Up to 10^12 s. Computed in float32, half of the edges from 417901 s (5 days) on would be misplaced."""
    for bucket in range(1, 100):
        edge = first_second(bucket)
        below = max(b for b in range(bucket) if first_second(b) <= edge - 1) if edge > 1 else 0
        first_of_next = first_second(bucket + 1)
        expected = bucket if edge < first_of_next else max(b for b in range(120) if first_second(b) <= edge)
        seconds = torch.tensor([edge - 1, edge, 1 - edge, -edge])
        assert time_bucket(seconds, 128).tolist() == [below, expected, below, expected]


def test_zero_one_and_the_last_bucket():
    seconds = torch.tensor([0, 1, -1, 2, 2**62, -(2**62)])
    assert time_bucket(seconds, 8).tolist() == [0, 0, 0, 2, 7, 7]
    assert time_bucket(seconds, 1).tolist() == [0] * 6


def test_neighbouring_seconds_of_today_are_told_apart():
    """As float32, today's epoch has a resolution of 128 s."""
    now = torch.tensor([1_763_636_463])
    assert time_bucket(now + 3 - now, 64).item() == 3 and time_bucket(now + 2 - now, 64).item() == 2


def test_targets_stand_directly_behind_the_history():
    position, history_end = torch.arange(9), torch.tensor(4)
    assert relative_positions(position, history_end, 1).tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert relative_positions(position, history_end, 2).tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 4]
    assert relative_positions(position, torch.tensor(0), 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert relative_positions(position, torch.tensor(9), 2).tolist() == list(range(9))


TIMES = torch.zeros(5, dtype=torch.int64)
TIMES_SHAPE = r"timestamps must have shape \[total_len\]"
WRONG = [
    ({"position_table": TIMES}, TypeError, "position_table must be a floating"),
    ({"time_table": torch.zeros(2, 3, 4)}, ValueError, r"time_table must have shape .* got \(2, 3, 4\)"),
    ({"time_table": torch.zeros(0)}, ValueError, r"time_table must have shape .* got \(0,\)"),
    ({"timestamps": torch.zeros(5)}, TypeError, r"timestamps must be int64 seconds .* got torch.float32"),
    ({"next_timestamps": TIMES.int()}, TypeError, "next_timestamps must be int64 seconds"),
    ({"timestamps": TIMES[:, None]}, ValueError, TIMES_SHAPE),
]


def fields(**changes):
    tables = {"position_table": torch.zeros(3), "time_table": torch.zeros(3)}
    return tables | {"timestamps": TIMES, "next_timestamps": TIMES} | changes


test_wrong_fields_are_named = refused(RelativeBias, fields, WRONG)
