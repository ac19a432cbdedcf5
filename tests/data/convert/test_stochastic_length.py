"""Thinned-out histories: the paper's rule in a loop over rows, and the frequencies that it promises."""

import numpy as np
import pyarrow as pa
import pytest

from recsys import protos as pb
from recsys.config import resolve
from recsys.data.convert.converter import Converter, Origin
from recsys.data.convert.stochastic_length import limit, subsample
from recsys.data.hashing import combine
from recsys.data.schema.layout_rule import LayoutRule

N = 100


def config(**fields) -> pb.StochasticLength:
    return pb.StochasticLength(**fields)


def histories(lengths: list[int], seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return np.concatenate([np.sort(generator.integers(0, 10**6, n)) for n in lengths] or [[]]).astype(int)


def rows(count: int, epoch: int = 0) -> np.ndarray:
    return combine(7, epoch, np.arange(count))


@pytest.mark.parametrize("selection", ["RECENCY_WEIGHTED", "UNIFORM", "NEWEST"])
def test_each_row_keeps_all_or_the_limit(selection: str) -> None:
    lengths = np.array([0, 1, 10, 39, 40, 100, 0, 64, 100, 100, 3] * 20)
    message = config(alpha=1.6, selection=selection)
    assert limit(message, N) == 39  # 100 ** 0.8 = 39.8
    timestamps = histories(lengths.tolist())
    kept = subsample(message, N, lengths, timestamps, rows(len(lengths)))
    thinned = 0
    start = taken = 0
    for length, left in zip(lengths, kept.lengths, strict=True):
        mine = kept.places[taken : taken + left] - start
        assert (np.diff(mine) > 0).all() and ((0 <= mine) & (mine < length)).all()
        if length <= 39:
            assert left == length
        assert left in (length, 39)
        if left < length:
            thinned += 1
            if selection == "NEWEST":
                np.testing.assert_array_equal(mine, np.arange(length - 39, length))
        start, taken = start + length, taken + left
    assert taken == len(kept.places)
    assert 40 < thinned < 100


def test_long_histories_are_kept_as_often_as_the_paper_says() -> None:
    lengths = np.repeat([50, 80, 100], 20_000)
    kept = subsample(config(alpha=1.6), N, lengths, histories(lengths.tolist()), rows(len(lengths)))
    for length in (50, 80, 100):
        share = (kept.lengths[lengths == length] == length).mean()
        assert share == pytest.approx(min(1, N**1.6 / length**2), abs=0.012)


def test_draws_follow_the_weights() -> None:
    # Two of three events are drawn: weights 1 - age / sum of ages are 1/4, 3/4 and 1 for ages 3, 1 and 0.
    count = 40_000
    lengths = np.full(count, 3)
    timestamps = np.tile([0, 2, 3], count)
    message = config(alpha=1.28)  # 3 ** 0.64 = 2.02
    assert limit(message, 3) == 2
    kept = subsample(message, 3, lengths, timestamps, rows(count))
    present = np.zeros((count, 3), bool)
    present.reshape(-1)[kept.places] = True
    present = present[kept.lengths == 2]
    weights = [0.25, 0.75, 1.0]
    for left_out in range(3):
        first, second = [event for event in range(3) if event != left_out]
        # Either of the pair first, then the other from what is left.
        probability = sum(
            weights[a] / 2 * weights[b] / (2 - weights[a]) for a, b in ((first, second), (second, first))
        )
        assert (~present[:, left_out]).mean() == pytest.approx(probability, abs=0.015)


def test_uniform_draws_are_uniform() -> None:
    count = 30_000
    kept = subsample(
        config(alpha=1.28, selection="UNIFORM"), 3, np.full(count, 3), np.tile([0, 2, 3], count), rows(count)
    )
    present = np.zeros((count, 3), bool)
    present.reshape(-1)[kept.places] = True
    np.testing.assert_allclose(present[kept.lengths == 2].mean(0), 2 / 3, atol=0.015)


def test_equal_times_and_no_rows() -> None:
    kept = subsample(config(alpha=1.1), 16, np.full(50, 16), np.full(800, 5), rows(50))
    assert (kept.lengths[kept.lengths < 16] == limit(config(alpha=1.1), 16)).all()
    nothing = subsample(config(), 16, np.zeros(0, np.int64), np.zeros(0, np.int64), rows(0))
    assert len(nothing.places) == len(nothing.lengths) == 0


def pipeline() -> pb.Pipeline:
    actual = pb.Pipeline()
    actual.data.max_history_len = 20
    actual.data.stochastic_length.alpha = 1.4
    for name, sides in (("item_id", [pb.HISTORY, pb.CANDIDATE]),):
        feature = actual.features.add(name=name, sides=sides)
        feature.id.hash.num_buckets = 1000
        feature.id.table = name
    actual.model.embedding_dim = 4
    actual.model.max_seq_len = 64
    task = actual.model.ranker.tasks.add(name="is_click")
    task.loss.binary_cross_entropy.SetInParent()
    return resolve(actual, read_files=False).pipeline


def table(count: int) -> pa.Table:
    generator = np.random.default_rng(1)
    lengths = generator.integers(0, 30, count)
    return pa.table(
        {
            "request_time": pa.array([10**6] * count),
            "uih_timestamps": [np.sort(generator.integers(0, 10**6, n)).tolist() for n in lengths],
            "uih_item_id": [[int(row * 100 + i) for i in range(n)] for row, n in enumerate(lengths)],
            "candidate_item_id": [[1]] * count,
            "candidate_is_click": [[1]] * count,
        }
    )


def converted(mode: str, epoch: int = 0, first_row: int = 0, rows_of: slice = slice(None)):
    given = table(60)[rows_of]
    return Converter.open(pipeline(), LayoutRule(0, True), mode=mode).block(
        given, Origin(first_row=first_row, epoch=epoch)
    )


def test_columns_stay_aligned_and_only_training_is_thinned_out() -> None:
    full, thinned = converted("evaluate"), converted("train")
    assert (full.lengths[pb.HISTORY] <= 20).all()
    assert thinned.lengths[pb.HISTORY].sum() < full.lengths[pb.HISTORY].sum()
    pairs = dict(
        zip(
            zip(full.flat["uih_item_id"].values, full.flat["uih_timestamps"].values, strict=True),
            range(10**6),
            strict=False,
        )
    )
    got = list(zip(thinned.flat["uih_item_id"].values, thinned.flat["uih_timestamps"].values, strict=True))
    assert len(got) == thinned.lengths[pb.HISTORY].sum() > 0
    # Every event of training is one of evaluation, in the same order.
    order = [pairs[item] for item in got]
    assert order == sorted(order)


def test_a_draw_depends_on_row_and_epoch_alone() -> None:
    whole = converted("train")
    part = converted("train", first_row=30, rows_of=slice(30, 60))
    np.testing.assert_array_equal(whole.lengths[pb.HISTORY][30:], part.lengths[pb.HISTORY])
    start = whole.lengths[pb.HISTORY][:30].sum()
    np.testing.assert_array_equal(
        whole.flat["uih_timestamps"].values[start:], part.flat["uih_timestamps"].values
    )
    next_epoch = converted("train", epoch=1)
    assert (next_epoch.lengths[pb.HISTORY] != whole.lengths[pb.HISTORY]).any()
