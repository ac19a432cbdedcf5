"""Batches of a loader: every row once however it is read, resumed and shared out; errors and processes."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from recsys import protos as pb
from recsys.data import loader as loaders
from recsys.data.batch import LayoutRule, Position
from recsys.data.loader import Loader
from recsys.data.plan.epoch import EpochPlan
from recsys.data.workers import reader
from recsys.errors import DataError, RecsysError

RULE = LayoutRule(num_contextual=2, targets=True)


def loader(sample, **settings) -> Loader:
    return Loader.open(sample.pipeline, "train", RULE, **{"shuffle": True, **settings})


def real_rows(batches) -> list[tuple[int, int]]:
    """(file, row) of the rows with weight."""
    results = []
    for batch in batches:
        pairs = zip(
            batch.rows.file.tolist(), batch.rows.row.tolist(), batch.sample_weight.tolist(), strict=True
        )
        results += [(file, row) for file, row, weight in pairs if weight]
    return results


def same(a, b) -> bool:
    """True if two batches hold the same numbers."""
    plain = (
        "uih_lengths",
        "num_candidates",
        "request_time",
        "uih_timestamps",
        "uih_actions",
        "uih_watch_time",
    )
    plain += ("candidate_timestamps", "sample_weight", "group")
    dicts = ("value_counts", "numbers", "labels")
    return (
        a.position == b.position
        and all(torch.equal(getattr(a, name), getattr(b, name)) for name in plain)
        and all(torch.equal(getattr(a, d)[k], getattr(b, d)[k]) for d in dicts for k in getattr(a, d))
        and torch.equal(a.ids.values(), b.ids.values())
        and torch.equal(a.ids.lengths(), b.ids.lengths())
        and torch.equal(a.layout.lengths, b.layout.lengths)
    )


@pytest.fixture
def two_files(sample):
    sample.write(sample.rows(33), "train/part-0.parquet")
    sample.write(sample.rows(53)[33:], "train/part-1.parquet")
    sample.pipeline.data.train.parquet.paths[:] = [str(sample.folder / "train")]
    return sample


ALL = Counter([(0, row) for row in range(33)] + [(1, row) for row in range(20)])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_row_exactly_once_over_ranks(two_files, world):
    ranks = [list(loader(two_files, rank=rank, world_size=world).epoch(1)) for rank in range(world)]
    assert Counter(row for batches in ranks for row in real_rows(batches)) == ALL
    assert {len(batches) for batches in ranks} == {loader(two_files, world_size=world).num_steps(1)}


def test_resumed_with_another_world_size(two_files):
    """3 steps on 2 ranks, 1 step on 3 ranks, the rest on 1."""
    taken, start = [], 0
    for world, steps in ((2, 3), (3, 1), (1, 99)):
        positions = set()
        for rank in range(world):
            batches = loader(two_files, rank=rank, world_size=world).epoch(4, start)
            head = [batch for _, batch in zip(range(steps), batches, strict=False)]
            taken += real_rows(head)
            positions.add(head[-1].position)
        (position,) = positions
        start = position.index + 1
    assert Counter(taken) == ALL
    assert list(loader(two_files).epoch(4, start)) == []


def test_epochs_differ_and_repeat(two_files):
    first, again, next_epoch = (real_rows(loader(two_files).epoch(epoch)) for epoch in (0, 0, 1))
    assert first == again != next_epoch


@pytest.mark.parametrize("start", [0, 5])
def test_processes_read_what_this_process_reads(two_files, start):
    two_files.pipeline.features[1].id.vocabulary.unknown_rate = 0.5
    here = list(loader(two_files).epoch(2, start))
    two_files.pipeline.data.num_workers = 2
    there = list(loader(two_files).epoch(2, start))
    assert len(here) == len(there) and all(same(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 2), (7, 8)])
def test_readers_go_on_from_epoch_to_epoch(two_files, num_workers, rank, world):
    """Also where a rank has no batch of an epoch: rank 7 of 8 gets fillers where there are fewer."""
    two_files.pipeline.data.num_workers = num_workers
    alone = loader(two_files, rank=rank, world_size=world)
    one_by_one = [batch for epoch, start in ((3, 2), (4, 0), (5, 0)) for batch in alone.epoch(epoch, start)]
    together = list(islice(loader(two_files, rank=rank, world_size=world).epochs(3, 2), len(one_by_one)))
    assert all(same(a, b) for a, b in zip(one_by_one, together, strict=True))


def test_reading_leaves_the_random_numbers_of_torch_alone(two_files):
    two_files.pipeline.data.num_workers = 1
    before = torch.get_rng_state()
    next(iter(loader(two_files).epoch(0)))
    assert torch.equal(before, torch.get_rng_state())


def test_a_batch(sample):
    rows = [sample.row(1, events=2, candidates=3), sample.row(2, events=0, candidates=1)]
    sample.write(rows)
    (batch,) = loader(sample, shuffle=False).epoch(0)
    assert batch.layout.lengths.tolist() == [2 + 2 + 3, 2 + 0 + 1]
    assert batch.layout.num_targets.tolist() == [3, 1] and batch.layout.num_contextual == 2
    names = ["user_id", "uih_item_id", "candidate_item_id", "uih_tags", "candidate_tags", "age"]
    assert list(batch.ids.keys()) == names
    row_of = {value: i + 1 for i, value in enumerate(sample.vocabulary)}
    items = batch.ids["candidate_item_id"]
    assert items.values().tolist() == [row_of[i] for row in rows for i in row["candidate_item_id"]]
    assert items.lengths().tolist() == [3, 1]
    assert (
        batch.labels["watch"].tolist() == [0.0, 1.5, 3.0, 0.0]
        and batch.labels["watch"].dtype == torch.float32
    )
    assert batch.position == Position(0, 0)
    assert batch.rows.row.tolist() == [0, 1]
    assert batch.ids.length_per_key() == [2, 2, 4, 1, 8, 2]


def test_a_rank_without_a_last_batch_gets_a_filler(sample):
    sample.write(sample.rows(9))
    batches = [list(loader(sample, rank=rank, world_size=2).epoch(0)) for rank in (0, 1)]
    assert loader(sample).num_batches(0) == 3 and [len(item) for item in batches] == [2, 2]
    last = batches[1][1]
    assert last.sample_weight.tolist() == [0.0] * 4 and last.rows.row.tolist() == [-1] * 4
    assert last.layout.lengths.tolist() == [2] * 4 and last.layout.total_targets == 0
    assert last.ids["user_id"].lengths().tolist() == [1] * 4
    assert {batch[1].position for batch in batches} == {Position(0, 2)}


def test_prediction_keeps_the_order_of_the_files(two_files):
    two_files.pipeline.data.eval_batch_size = 6
    two_files.pipeline.data.num_workers = 2
    source = pb.Source(parquet=pb.ParquetSource(paths=[str(two_files.folder / "train" / "*.parquet")]))
    predict = Loader.open(two_files.pipeline, source, RULE, mode="predict")
    batches = list(predict.epoch(0))
    assert real_rows(batches) == sorted(ALL)
    keys = [user for batch in batches for user in batch.rows.keys["user_id"].to_pylist()]
    assert keys == list(range(53))
    assert all(batch.labels == {} for batch in batches)


def test_prediction_of_no_rows(sample):
    sample.write([])
    assert list(Loader.open(sample.pipeline, "train", RULE, mode="predict").epoch(0)) == []
    with pytest.raises(DataError, match=r"train.parquet: there are no rows"):
        loader(sample)


def test_evaluation_has_its_own_batch_size(two_files):
    two_files.pipeline.data.validation.CopyFrom(two_files.pipeline.data.train)
    two_files.pipeline.data.eval_batch_size = 7
    batches = list(Loader.open(two_files.pipeline, "validation", RULE).epoch(0))
    assert Counter(real_rows(batches)) == ALL and max(len(batch.request_time) for batch in batches) == 7


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_is_the_users_error(sample, num_workers):
    rows = sample.rows(30)
    rows[17]["age"] = None
    sample.write(rows)
    sample.pipeline.data.num_workers = num_workers
    with pytest.raises(DataError, match=r"^\S+/train.parquet, row 17: age is null") as caught:
        list(loader(sample).epoch(0))
    assert type(caught.value) is DataError and caught.value.__cause__ is None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_rows_left_out_are_counted_once(sample, num_workers, caplog):
    rows = sample.rows(40)
    for i, broken in ((3, {"age": None}), (20, {"age": None}), (31, {"user_id": -1})):
        rows[i].update(broken)
    sample.write(rows)
    sample.pipeline.data.num_workers = num_workers
    sample.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    reading = loader(sample)
    for epoch in (0, 1):
        batches = list(reading.epoch(epoch))
        assert Counter(real_rows(batches)) == Counter((0, i) for i in range(40) if i not in (3, 20, 31))
        assert reading.counter.by_name == {"null": 2, "negative": 1}
        said = f"train rows of epoch {epoch}: 3 of 40 were left out (null 2, negative 1)"
        assert caplog.messages[-1] == said
        assert sum(batch.rows.counts.left_out for batch in batches) == reading.counter.counts.left_out == 3


def test_rows_left_out_are_said_when_reading_ends_early(sample, caplog):
    rows = sample.rows(40)
    for row in rows:
        row["age"] = None
    sample.write(rows)
    sample.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    batches = loader(sample, rank=1, world_size=2).epoch(3)
    size = len(next(batches).request_time)
    batches.close()
    said = f"train rows of epoch 3, rank 1: {size} of {size} were left out (null {size})"
    assert caplog.messages == [said]


def test_too_many_bad_rows(sample):
    rows = sample.rows(40)
    for i in range(5, 16):
        rows[i]["age"] = None
    sample.write(rows)
    sample.pipeline.data.bad_rows.policy = pb.BadRows.SKIP
    sample.pipeline.data.bad_rows.limit = 10
    with pytest.raises(
        DataError, match=r"11 rows were left out \(null 11\), more than data.bad_rows.limit = 10"
    ):
        list(loader(sample).epoch(0))
    sample.pipeline.data.bad_rows.limit = 11
    reading = loader(sample)
    for _ in range(3):  # counted anew each time, also for the same epoch
        assert len(real_rows(reading.epoch(0))) == 29


@pytest.mark.parametrize(("num_workers", "rank", "world"), [(0, 0, 1), (2, 0, 1), (2, 1, 2), (2, 7, 8)])
def test_kept_readers_read_the_same_batches_again(two_files, monkeypatch, num_workers, rank, world):
    """A row is bad: it counts once in each pass, so that its limit of 1 holds for any number of them."""
    rows = two_files.rows(33)
    rows[5]["age"] = None
    two_files.write(rows, "train/part-0.parquet")
    data = two_files.pipeline.data
    data.bad_rows.policy, data.bad_rows.limit, data.num_workers = pb.BadRows.SKIP, 1, num_workers
    share = {"shuffle": False, "rank": rank, "world_size": world}
    expected = list(loader(two_files, **share).epoch(0))
    pools, pool = [], loaders.ReaderPool
    monkeypatch.setattr(
        loaders, "ReaderPool", lambda *given, **named: pools.append(1) or pool(*given, **named)
    )
    reading = loader(two_files, **share, keep_readers=True)
    passes = set()
    for limit in (None, None, None, 2, 2):
        batches = list(reading.first(limit))
        assert len(batches) == len(expected[:limit])
        assert all(same(a, b) for a, b in zip(batches, expected, strict=False))
        left_out = sum(batch.rows.counts.left_out for batch in expected[:limit])
        assert reading.counter.counts.left_out == left_out
        passes.add(range(rank, reading.num_batches(), world)[:limit])
        assert len(pools) == (sum(map(bool, passes)) if num_workers else 0)
    next(reading.first())  # and no more
    assert all(same(a, b) for a, b in zip(reading.first(), expected, strict=True))
    reading.close()
    assert not multiprocessing.active_children()


def test_cut_histories_are_counted_and_said_once(sample, caplog):
    caplog.set_level("INFO", "recsys")
    sample.write([sample.row(i, events=i) for i in range(12)])
    reading = loader(sample)
    for epoch in (0, 1):
        batches = list(reading.epoch(epoch))
        assert reading.counter.by_name == {"truncated_history": 6}
        assert sum(batch.rows.counts.cut_histories for batch in batches) == 6
    (record,) = caplog.records
    assert record.levelname == "INFO"
    what = "6 of 12 had more events than data.max_history_len, the newest were read"
    assert record.message == f"train rows of epoch 0: {what}"


def test_cut_candidates_are_a_warning_where_they_are_evaluated(sample, caplog):
    caplog.set_level("INFO", "recsys")
    sample.pipeline.data.max_candidates = 2
    sample.pipeline.data.validation.CopyFrom(sample.pipeline.data.train)
    sample.write([sample.row(i, events=1, candidates=i) for i in range(1, 5)])
    list(loader(sample).epoch(0))
    reading = Loader.open(sample.pipeline, "validation", RULE)
    for _ in range(2):
        list(reading.epoch(0))
    assert reading.counter.counts == (0, 0, 2, 0)
    training, evaluating = caplog.records
    assert [training.levelname, evaluating.levelname] == ["INFO", "WARNING"]
    what = "2 of 4 had more candidates than data.max_candidates, the first were read"
    assert [training.message, evaluating.message] == [
        f"train rows of epoch 0: {what}",
        f"validation rows: {what}",
    ]


def test_a_file_that_changed_under_way(sample):
    sample.write(sample.rows(40))
    reading = loader(sample)
    sample.write(sample.rows(39))
    with pytest.raises(DataError, match="train.parquet: it changed while it was read"):
        list(reading.epoch(0))


def readers() -> list[int]:
    """Reader processes of this one: children of its fork server. Earlier tests may have left others."""
    server = forkserver._forkserver._forkserver_pid
    return [int(child) for child in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


needs_proc = pytest.mark.skipif(
    not os.path.isdir("/proc/self") or "forkserver" not in multiprocessing.get_all_start_methods(),
    reason="finds processes through /proc",
)


@needs_proc
def test_stopping_early_leaves_no_process_behind(sample):
    sample.write(sample.rows(200))
    sample.pipeline.data.num_workers = 2
    batches = loader(sample).epoch(0)
    next(batches)
    assert len(readers()) == 2
    batches.close()
    deadline = time.monotonic() + 10
    while readers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert readers() == []


@needs_proc
def test_a_killed_reader_is_named(sample):
    sample.write(sample.rows(400))
    sample.pipeline.data.num_workers = 1
    batches = loader(sample).epoch(0)
    next(batches)
    (process,) = readers()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RecsysError, match=r"a reader process died .*lower data.num_workers"):
        list(batches)


def test_every_file_has_a_mark_of_its_content(two_files):
    first = loader(two_files).source.marks()
    paths = [two_files.folder / "train" / f"part-{i}.parquet" for i in (0, 1)]
    assert [(mark.path, mark.size) for mark in first] == [(str(p), p.stat().st_size) for p in paths]
    assert loader(two_files).source.marks() == first
    two_files.write(two_files.rows(54)[33:], "train/part-1.parquet")
    second = loader(two_files).source.marks()
    assert first[0] == second[0] and first[1] != second[1]


def test_a_split_that_is_not_set(sample):
    with pytest.raises(DataError, match="data.test is not set. Give it a source"):
        Loader.open(sample.pipeline, "test", RULE)


def test_looking_ahead_does_not_disturb_an_epoch(two_files):
    reading, idle = loader(two_files), loader(two_files)
    rows = []
    for batch in reading.epoch(0):
        assert reading.num_batches(5) == idle.num_batches(5)
        rows += real_rows([batch])
    assert rows == real_rows(idle.epoch(0))


def test_an_epoch_is_planned_once(two_files, monkeypatch):
    """Every step asks for the number of its batches, and a plan takes milliseconds."""
    planned = []
    monkeypatch.setattr(reader, "EpochPlan", lambda *args: planned.append(args[2]) or EpochPlan(*args))
    reading = loader(two_files)
    assert len({reading.num_batches(1) for _ in range(3)}) == 1
    assert planned == [1]


def test_a_rank_outside_the_world(sample):
    with pytest.raises(ValueError, match="rank is 2, world_size 2"):
        loader(sample, rank=2, world_size=2)
