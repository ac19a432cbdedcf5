"""The order of an epoch: properties that hold for any files and settings."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys.data.plan.epoch import EpochPlan, PlanSettings, resident_blocks
from recsys.data.sources import RowGroup

FILES = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=0, max_size=5)
ORDERS = st.builds(
    PlanSettings,
    batch_size=st.integers(1, 7),
    num_lanes=st.integers(1, 8),
    shuffle_row_groups=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)


def row_groups(files: list[list[int]]) -> list[RowGroup]:
    results = []
    for number, sizes in enumerate(files):
        starts = np.cumsum([0, *sizes]).tolist()
        results += [RowGroup(number, i, starts[i], size) for i, size in enumerate(sizes)]
    return results


def rows_of(plan: EpochPlan, index: int) -> list[tuple[int, int]]:
    """(file, row) of a batch, one by one."""
    results = []
    for part in plan.batch(index):
        members, order = plan.block(part.block)
        rows = [
            (g.file, g.first_row + i) for g in (plan.groups[m] for m in members) for i in range(g.num_rows)
        ]
        results += [rows[i] for i in (range(len(rows)) if order is None else order)][part.start : part.stop]
    return results


def all_rows(files: list[list[int]]) -> Counter:
    return Counter((number, row) for number, sizes in enumerate(files) for row in range(sum(sizes)))


@given(FILES, ORDERS, st.integers(0, 3))
def test_every_row_exactly_once(files, order, epoch):
    plan = EpochPlan(row_groups(files), order, epoch)
    batches = [rows_of(plan, k) for k in range(plan.num_batches)]
    assert Counter(row for batch in batches for row in batch) == all_rows(files)
    assert all(1 <= len(batch) <= order.batch_size for batch in batches)
    # Only the last batch of each lane may be short.
    assert sum(len(batch) < order.batch_size for batch in batches) <= plan.num_lanes <= order.num_lanes


@given(FILES, ORDERS, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4))
def test_resumed_with_other_world_sizes(files, order, stretches):
    """Stretches of (ranks, steps) one after the other, each from where the last one stopped."""
    plan = EpochPlan(row_groups(files), order, 0)
    taken, start = [], 0
    for world, steps in stretches:
        for step in range(steps):
            taken += [start + step * world + rank for rank in range(world)]
        start += world * steps
    taken += range(start, plan.num_batches)
    assert [k for k in taken if k < plan.num_batches] == list(range(plan.num_batches))


@given(FILES, ORDERS)
def test_a_batch_can_be_asked_for_alone_and_again(files, order):
    plan, again = (EpochPlan(row_groups(files), order, 1) for _ in range(2))
    backwards = {k: rows_of(plan, k) for k in reversed(range(plan.num_batches))}
    assert [rows_of(again, k) for k in range(again.num_batches)] == [backwards[k] for k in sorted(backwards)]


def test_unshuffled_rows_of_one_lane_keep_the_order_of_the_files():
    files = [[3, 4], [], [0, 5]]
    plan = EpochPlan(row_groups(files), PlanSettings(batch_size=5), 0)
    rows = [row for k in range(plan.num_batches) for row in rows_of(plan, k)]
    assert rows == [(0, i) for i in range(7)] + [(2, i) for i in range(5)]


def test_epochs_and_seeds_differ_and_mix_rows_of_several_row_groups():
    groups = row_groups([[16] * 16])

    def batches(seed: int, epoch: int) -> list:
        order = PlanSettings(batch_size=16, num_lanes=2, shuffle_row_groups=4, seed=seed, shuffle=True)
        plan = EpochPlan(groups, order, epoch)
        return [rows_of(plan, k) for k in range(plan.num_batches)]

    first = batches(0, 0)
    assert first == batches(0, 0)
    assert first != batches(0, 1) and first != batches(1, 0)
    sources = [len({row // 16 for _, row in batch}) for batch in first]
    # 16 rows out of 4 row groups of 16: all four are missed by no batch but with 4 * (3/4)^16 = 4 %.
    assert np.mean(sources) > 3.5


def test_the_order_is_uniform():
    """Over many epochs each row stands at each place equally often."""
    places = np.zeros((8, 8))
    epochs = 4000
    for epoch in range(epochs):
        plan = EpochPlan(row_groups([[4, 4]]), PlanSettings(8, shuffle_row_groups=2, shuffle=True), epoch)
        for place, (_, row) in enumerate(rows_of(plan, 0)):
            places[place, row] += 1
    expected, deviation = epochs / 8, (epochs / 8 * 7 / 8) ** 0.5
    assert abs(places - expected).max() < 5 * deviation


def test_lanes_take_turns_and_meet_their_own_row_groups_only():
    plan = EpochPlan(
        row_groups([[10] * 32]), PlanSettings(5, num_lanes=4, shuffle_row_groups=2, shuffle=True), 0
    )
    seen = [
        {row // 10 for k in range(lane, plan.num_batches, 4) for _, row in rows_of(plan, k)}
        for lane in range(4)
    ]
    assert [len(groups) for groups in seen] == [8, 8, 8, 8]
    assert set.union(*seen) == set(range(32))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 8))
def test_lanes_of_unequal_row_groups_end_at_nearly_the_same_time(sizes, num_lanes):
    plan = EpochPlan(row_groups([sizes]), PlanSettings(batch_size=1, num_lanes=num_lanes), 0)
    rows = [int(lane.starts[-1]) for lane in plan._lanes]
    assert sum(rows) == sum(sizes) and max(rows) - min(rows) <= max(sizes)


def test_few_row_groups_use_fewer_lanes_a_divisor_of_the_setting():
    def lanes(groups: int, num_lanes: int, mixed: int) -> int:
        order = PlanSettings(4, num_lanes=num_lanes, shuffle_row_groups=mixed, shuffle=True)
        return EpochPlan(row_groups([[8] * groups]), order, 0).num_lanes

    assert [lanes(n, 16, 4) for n in (1, 4, 8, 12, 30, 63, 64, 1000)] == [1, 1, 2, 2, 4, 8, 16, 16]
    assert lanes(5, 6, 1) == 3


def test_blocks_that_a_reader_works_on():
    plan = EpochPlan(
        row_groups([[8] * 64]), PlanSettings(4, num_lanes=16, shuffle_row_groups=4, shuffle=True), 0
    )
    assert [resident_blocks(plan, readers) for readers in (1, 2, 8, 16, 32, 3)] == [17, 9, 3, 2, 2, 17]


def test_nothing_to_read():
    assert EpochPlan([], PlanSettings(4), 0).num_batches == 0
    assert EpochPlan(row_groups([[0, 0]]), PlanSettings(4, num_lanes=3), 0).num_batches == 0
