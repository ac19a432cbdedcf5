"""Rows are divided evenly, each is computed by one rank, and a run that resumes divides them alike."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from recsys import config
from recsys.data.convert.batch_rows import BatchRows
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule
from recsys.training import balance
from recsys.training.balance import RowExchange, divide
from tests.data.convert.test_batch_rows import FORMS
from tests.integration.runs import CONFIG
from tests.tools.forks import run_ranks

BATCH, RANKS, STEPS = 6, 3, 3


def test_work_is_close_to_the_best_division():
    random = np.random.default_rng(0)
    for _ in range(20):
        costs = [random.integers(1, 100, size) for size in (4, 0, 3)]
        owners, every = np.concatenate(divide(costs)), np.concatenate(costs)
        divisions = itertools.product(range(3), repeat=len(every))
        best = min(np.bincount(division, every, 3).max() for division in divisions)
        loads = np.bincount(owners, every, 3)
        assert loads.max() <= 4 / 3 * best and loads.min() > 0


def test_even_work_stays_where_it_is():
    costs = [np.array([5, 100]), np.array([101, 5]), np.array([104])]
    assert [owner.tolist() for owner in divide(costs)] == [[0, 0], [1, 1], [2]]
    costs[2][0] = 120
    assert [owner.tolist() for owner in divide(costs)] != [[0, 0], [1, 1], [2]]


@pytest.mark.parametrize("form", FORMS)
def test_costs_are_those_of_rows_alone(form, monkeypatch):
    """The costs of rows add up to that of their batch, up to the rounding of lengths above 127."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    pipeline, loader = pipeline_and_loader(0, 1, *FORMS[form])
    model = build_model(pipeline)
    exchange = row_exchange(pipeline, model, loader)
    arrays = loader._reader.read(0, 0)
    assert exchange.costs(arrays).sum() == model.flops(loader.collate(arrays))
    monkeypatch.setattr(exchange, "_count_flops", lambda rows: 500 + 7 * int(rows.uih_lengths.sum()))
    exchange._costs.clear()
    exchange._shared = None
    assert exchange.costs(arrays).tolist() == [max(1, 7 * n) for n in arrays.uih_lengths.tolist()]
    lengths = np.array([0, 1, 127, 128, 129, 1000, 4095])
    assert balance._rounded(lengths).tolist() == [0, 1, 127, 128, 130, 1000, 4096]


class Recorded:
    """Exchanges nothing, and notes what it was asked for, by the first row of a batch."""

    def __init__(self):
        self.calls = []

    def begin(self, arrays):
        self.arrays = arrays
        self.calls.append(("begin", int(arrays.row[0])))

    def end(self):
        self.calls.append(("end", int(self.arrays.row[0])))
        return self.arrays


def test_rows_of_the_next_step_are_exchanged_while_a_step_is_computed():
    """When training stops early, what all ranks have begun is ended, too."""
    _, loader = pipeline_and_loader(0, 1)
    rows = [int(batch.rows.row[0]) for batch in itertools.islice(loader.epoch(0), 3)]
    loader.exchange = exchange = Recorded()
    epoch = loader.epoch(0)
    expected = [("begin", rows[0])]
    for row, following in itertools.pairwise(rows):
        assert int(next(epoch).rows.row[0]) == row
        expected += [("end", row), ("begin", following)]
        assert exchange.calls == expected
    epoch.close()
    assert exchange.calls == [*expected, ("end", rows[2])]
    loader.exchange = exchange = Recorded()
    assert len(list(loader.epoch(0))) == loader.num_steps()
    assert [call for call, _ in exchange.calls] == ["begin", "end"] * loader.num_steps()


def pipeline_and_loader(rank: int, world_size: int, *overrides: str):
    overrides = [*overrides, f"data.batch_size={BATCH}", "data.num_lanes=1", "data.num_workers=0"]
    pipeline = config.prepare(CONFIG, overrides).pipeline
    rule = layout_rule(pipeline)
    return pipeline, Loader.open(pipeline, "train", rule, rank=rank, world_size=world_size, shuffle=True)


def row_exchange(pipeline, model, loader) -> RowExchange:
    def count_flops(arrays):
        return model.flops(loader.collate(arrays))

    return RowExchange(BatchRows(pipeline, "train"), count_flops, loader.filler, BATCH)


def batches(rank: int, start: int, steps: int) -> list[tuple[list, int]]:
    """The rows of this rank's batches, (row, lengths), and the FLOP of each batch."""
    pipeline, loader = pipeline_and_loader(rank, RANKS)
    model = build_model(pipeline)
    loader.exchange = row_exchange(pipeline, model, loader)
    return [
        (
            list(zip(batch.rows.row.tolist(), batch.uih_lengths.tolist(), strict=True)),
            model.flops(batch),
        )
        for batch in itertools.islice(loader.epoch(0, start), steps)
    ]


def main(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    _, loader = pipeline_and_loader(rank, RANKS)
    # The last step has one batch of rows, and two ranks of fillers.
    last = (loader.num_batches(0) - 1) // RANKS * RANKS
    seen = [batches(rank, 0, STEPS), batches(rank, RANKS, STEPS - 1), batches(rank, last, 1)]
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(main, str(folder / "store"), str(folder), ranks=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_ranks_compute_the_rows_of_the_step_at_equal_cost(ranks):
    pipeline, alone = pipeline_and_loader(0, 1)
    model = build_model(pipeline)
    expected = list(itertools.islice(alone.epoch(0), STEPS * RANKS))
    before = []
    for step in range(STEPS):
        read = expected[step * RANKS : (step + 1) * RANKS]
        rows = [
            row
            for batch in read
            for row in zip(batch.rows.row.tolist(), batch.uih_lengths.tolist(), strict=True)
        ]
        assert sorted(map(tuple, sum((rank[0][step][0] for rank in ranks), []))) == sorted(rows)
        work = [rank[0][step][1] for rank in ranks]
        assert sum(work) == sum(model.flops(batch) for batch in read)
        assert max(work) * RANKS <= 1.1 * sum(work)
        before.append(max(model.flops(batch) for batch in read) * RANKS / sum(work))
    assert max(before) > 1.1, "some step was not even before"


def test_a_resumed_run_divides_rows_alike(ranks):
    for rank in ranks:
        assert rank[1] == rank[0][1:]


def test_rows_of_a_last_step_are_shared_with_ranks_that_have_none(ranks):
    (last,) = zip(*[rank[2] for rank in ranks], strict=True)
    real = [[row for row, _ in rows if row >= 0] for rows, _ in last]
    assert all(rows for rows, _ in last) and sum(map(len, real)) >= 2
    assert sum(bool(rows) for rows in real) >= 2
