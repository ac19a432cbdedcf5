"""Rows of one user, request and history share a run of it: the scores of whole rows, in the same order."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import config
from recsys import protos as pb
from recsys.data.convert.column_block import FlatColumn
from recsys.data.convert.converter import Origin
from recsys.inference import predictor
from recsys.inference.predictor import Predictor
from recsys.inference.rows import bounded_runs, cut_into_pieces
from recsys.inference.shared_rows import merge, same_as_before, without
from recsys.models import build_model
from recsys.scoring import scorer
from recsys.scoring.prefill import CachedModel

HSTU = "model.ranker.mixer.hstu"
TABLE = pq.read_table("tests/data/kuairand/test.parquet")
CANDIDATES = [name for name in TABLE.column_names if name.startswith("candidate_")]


def pipeline_of(*overrides: str) -> pb.Pipeline:
    return config.prepare("tests/integration/tiny.config", overrides).pipeline


class Watched(SimpleNamespace):
    """Stands in for a package: computes with the model, and notes the calls of the predictor."""

    def __init__(self, pipeline: pb.Pipeline, *, cached: bool):
        torch.manual_seed(0)
        self.model = build_model(pipeline).eval()
        for name, parameter in self.model.named_parameters():
            if not name.startswith("embed"):
                torch.nn.init.normal_(parameter, std=0.3)
        outputs = [task.name for task in pipeline.model.ranker.tasks]
        super().__init__(
            pipeline=pipeline,
            items=None,
            description=SimpleNamespace(outputs=outputs, device="cpu"),
            cached=self if cached else None,
            extends=False,
            ran=[],
            prefilled=[],
            scored=[],
        )

    @torch.no_grad()
    def run(self, batch):
        self.ran.append(batch.num_candidates.tolist())
        return self.model.score(batch)

    @torch.no_grad()
    def prefill(self, batch):
        assert batch.layout.total_targets == len(batch.candidate_timestamps) == 0
        self.prefilled.append(len(batch.uih_lengths))
        return CachedModel(self.model).prefill(batch)

    @torch.no_grad()
    def score(self, batch, cache):
        assert len(batch.uih_timestamps) == 0
        self.scored.append(batch.num_candidates.tolist())
        return CachedModel(self.model).score(batch, cache)


def split(row: dict, *counts: int) -> list[dict]:
    """The row as several, each with the next candidates."""
    starts = np.cumsum([0, *counts]).tolist()
    return [
        row | {name: row[name][start:stop] for name in CANDIDATES}
        for start, stop in zip(starts[:-1], starts[1:], strict=True)
    ]


def table_of(rows: list[dict]) -> pa.Table:
    """Each row is a request of its own."""
    return pa.Table.from_pylist([row | {"request_id": n} for n, row in enumerate(rows)], TABLE.schema)


def long_row(number: int, count: int) -> dict:
    """A row with as many candidates, at several times."""
    row, pool = TABLE.slice(number, 1).to_pylist()[0], TABLE.slice(0, 60).to_pylist()
    for name in CANDIDATES:
        row[name] = [value for donor in pool for value in donor[name]][:count]
    row["candidate_timestamps"] = [row["request_time"] + i % 3 for i in range(count)]
    return row


def rows_with_much_in_common() -> pa.Table:
    first, second, third = (long_row(number, count) for number, count in ((0, 30), (7, 11), (12, 3)))
    alone = TABLE.slice(20, 3).to_pylist()
    rows = [
        *split(first, 12, 0, 6, 12),
        alone[0],
        *split(second, 11),
        *split(second | {"hour": second["hour"] + 1}, 5, 6),  # another user feature
        *split(third | {name: third[name][1:] for name in third if name.startswith("uih_")}, 3),
        *split(third, 1, 2),
        alone[1] | {name: [] for name in CANDIDATES},
        alone[2] | {name: [] for name in alone[2] if name.startswith("uih_")},
        *split(first, 30),  # like the first ones, but not behind them
    ]
    return table_of(rows)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("users", "most"), [(256, 1024), (2, 9), (3, 1)])
def test_scores_are_those_of_whole_rows(group, users, most, monkeypatch):
    monkeypatch.setattr(scorer, "ONE_PASS", 0)
    pipeline = pipeline_of(
        f"{HSTU}.mask.target_group_size={group}",
        f"predict.batch_size={users}",
        f"predict.candidates_per_microbatch={most}",
    )
    table = rows_with_much_in_common()
    package = Watched(pipeline, cached=True)
    actual = Predictor(package).table(table)
    expected = Predictor(Watched(pipeline, cached=False)).table(table)
    assert actual.schema == expected.schema
    for name in expected.column_names:
        got, want = actual[name].combine_chunks(), expected[name].combine_chunks()
        if name not in package.description.outputs:
            assert got.equals(want)
            continue
        assert got.value_lengths().equals(want.value_lengths())
        np.testing.assert_allclose(got.flatten().to_numpy(), want.flatten().to_numpy(), rtol=1e-5, atol=1e-5)
    # 14 rows, 2 of them without candidates; runs of 4, 2 and 2 share a prefill, where groups of 3 let them:
    # not behind 5 candidates or 1.
    assert sum(package.prefilled) == (8 if group == 1 else 10)
    assert max(package.prefilled) <= users
    size = -(-most // group) * group
    assert all(len(counts) * max(counts) <= size for counts in package.scored)


def test_without_the_programs_nothing_changes():
    package = Watched(pipeline_of(), cached=False)
    Predictor(package).table(TABLE.slice(0, 5))
    assert package.prefilled == []


def test_bad_rows_have_no_scores():
    rows = TABLE.slice(0, 3).to_pylist()
    rows[1]["uih_item_id"] = [*rows[1]["uih_item_id"], 7]
    pipeline = pipeline_of("data.bad_rows={policy: SKIP}")
    actual = Predictor(Watched(pipeline, cached=True)).table(pa.Table.from_pylist(rows, TABLE.schema))
    assert [scores is None for scores in actual["is_click"].to_pylist()] == [False, True, False]
    none = Predictor(Watched(pipeline, cached=True)).table(TABLE.slice(0, 0))
    assert len(none) == 0


def block_of(table: pa.Table):
    return Predictor(Watched(pipeline_of(), cached=True)).converter.block(table, Origin())


CHANGES = {
    "hour": lambda hour: hour + 1,
    "request_time": lambda time: time + 1,
    "uih_item_id": lambda items: [items[1], *items[1:]],
    "uih_timestamps": lambda times: [times[0] - 1, *times[1:]],
    "uih_tag": lambda tags: [[], *tags[1:]],
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_difference_of_user_or_history_is_seen(name):
    row = next(row for row in TABLE.to_pylist() if len(set(row["uih_item_id"])) >= 3)
    changed = row | {name: CHANGES[name](row[name])}
    same = same_as_before(block_of(table_of([row, row, changed, changed, row])))
    assert same.tolist() == [False, True, False, True, False]


def test_several_numbers_of_a_user_are_compared_together():
    block = block_of(table_of([TABLE.to_pylist()[0]] * 4))
    points = np.array([[0, 1], [0, 1], [2, 1], [2, 0]], np.float32)
    flat = block.flat | {"point": FlatColumn(pb.USER, points)}
    assert same_as_before(replace(block, flat=flat)).tolist() == [False, True, False, False]


def test_one_event_less_is_a_difference():
    row = next(row for row in TABLE.to_pylist() if len(row["uih_item_id"]) == 4)
    less = row | {name: row[name][1:] for name in row if name.startswith("uih_")}
    same = same_as_before(block_of(table_of([row, less, less])))
    assert same.tolist() == [False, False, True]


def test_lists_of_lists_are_compared_value_by_value():
    row = next(row for row in TABLE.to_pylist() if len(row["uih_tag"]) >= 3)
    few, many = 12, 60
    rows = [row | {"uih_tag": [*tags, *row["uih_tag"][2:]]} for tags in ([[few], [many]], [[few, many], []])]
    rows += [row | {"uih_tag": [[few], [few], *row["uih_tag"][2:]]}]
    same = same_as_before(block_of(table_of([rows[0], *rows])))
    assert same.tolist() == [False, True, False, False]


def test_merged_rows_keep_all_candidates():
    block = block_of(table_of(split(long_row(0, 12), 4, 0, 8)))
    merged = merge(block, 1)
    assert merged.lengths[pb.CANDIDATE].tolist() == [12] and len(merged.row) == 1
    column = merged.flat["candidate_item_id"].values
    assert np.array_equal(column, block.flat["candidate_item_id"].values)
    assert merge(block, 4).lengths[pb.CANDIDATE].tolist() == [12]
    assert merge(block, 3).lengths[pb.CANDIDATE].tolist() == [4, 8]
    bare = without(merged, pb.HISTORY)
    assert bare.lengths[pb.HISTORY].tolist() == [0] and len(bare.flat["uih_tag"].values) == 0
    assert len(merged.flat["uih_tag"].values) > 0


def test_rows_are_cut_into_pieces():
    assert cut_into_pieces(np.array([5, 0, 4, 9]), 4).row.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert cut_into_pieces(np.array([5, 0, 4, 9]), 4).lengths.tolist() == [4, 1, 0, 4, 4, 4, 1]


def test_batches_with_few_candidates_take_one_pass(monkeypatch):
    """The programs with a cache run for the batch with a longer row only; scores are those of one pass."""
    monkeypatch.setattr(scorer, "ONE_PASS", 11)
    table, package = rows_with_much_in_common(), Watched(pipeline_of("predict.batch_size=3"), cached=True)
    actual = Predictor(package).table(table)
    expected = Predictor(Watched(pipeline_of(), cached=False)).table(table)
    for name in package.description.outputs:
        got, want = (side[name].combine_chunks().flatten().to_numpy() for side in (actual, expected))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    # Rows of 30, 4, 11 candidates; 11, 3, 3; 6, 30, by three: the first and the last batch have a long row.
    assert [len(counts) for counts in package.ran] == [3] and max(package.ran[0]) <= 11
    assert sum(package.prefilled) == 5


def test_on_a_gpu_rows_run_whole_and_share_histories(monkeypatch):
    monkeypatch.setitem(predictor.LONGEST_ROW, "cuda", 11)
    monkeypatch.setattr(scorer, "ONE_PASS", 0)
    package = Watched(pipeline_of(), cached=True)
    package.description.device, batches, run = "cuda", [], package.run
    package.run = lambda batch: batches.append(batch) or run(batch)
    table = rows_with_much_in_common()
    actual = Predictor(package).table(table)
    package.description.device = "cpu"
    expected = Predictor(package).table(table)
    for name in package.description.outputs:
        got, want = (side[name].combine_chunks().flatten().to_numpy() for side in (actual, expected))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    # 8 users, the first and the last of them with 30 candidates: in 3 pieces.
    assert sum(len(batch.uih_lengths) for batch in batches) == 12


def test_calls_on_whole_rows_are_bounded_in_rows_and_candidates():
    assert list(bounded_runs([], 4, 9)) == []
    assert list(bounded_runs([3, 3, 3, 3], 4, 9)) == [slice(0, 3), slice(3, 4)]
    assert list(bounded_runs([1, 1, 1], 2, 9)) == [slice(0, 2), slice(2, 3)]
    assert list(bounded_runs([10, 1, 8, 10], 4, 9)) == [slice(0, 1), slice(1, 3), slice(3, 4)]
