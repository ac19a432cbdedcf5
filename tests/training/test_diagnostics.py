"""Slices and bins against loops over rows; one process against two; no side effects on the model."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recsys.models import build_model
from recsys.training.diagnostics import Diagnostics, slice_ends
from recsys.training.evaluator import evaluate
from tests.modules.pipelines import RANKER, RETRIEVER, batch_of, pipeline_of, random_rows
from tests.tools.forks import run_ranks

CPU = torch.device("cpu")
WIDE = "data { max_history_len: 40 }"
SIZES = [(0, 3), (12, 2), (10, 4), (11, 1), (0, 1), (3, 2), (40, 4), (9, 0), (1, 4), (25, 3)]
"""(events, candidates) of each row."""


@pytest.mark.parametrize(
    ("longest", "ends"),
    [
        (0, [0]),
        (1, [0, 1]),
        (19, [0, 19]),
        (20, [0, 10, 20]),
        (50, [0, 10, 50]),
        (210, [0, 10, 50, 210]),
        (400, [0, 10, 50, 200, 400]),
        (10_000, [0, 10, 50, 200, 1000, 5000, 10_000]),
    ],
)
def test_slices_end_where_histories_can(longest, ends):
    assert slice_ends(longest) == ends


def a_ranker():
    pipeline = pipeline_of(RANKER, WIDE)
    torch.manual_seed(5)
    model = build_model(pipeline).eval()
    weights = (1, 1, 2, 1, 1, 0, 1, 1, 0.5, 1)
    rows = random_rows(pipeline, SIZES)
    rows = [row.changed(weight=weight) for row, weight in zip(rows, weights, strict=True)]
    return pipeline, model, rows


def loader_of(pipeline, *parts):
    return SimpleNamespace(first=lambda _: iter([batch_of(pipeline, part) for part in parts]))


def look(pipeline, model, *parts, pictures=0):
    diagnostics = Diagnostics(model, CPU, pictures)
    metrics = evaluate(model, loader_of(pipeline, *parts), CPU, diagnostics=diagnostics)
    return metrics, diagnostics.results()


def test_slices_of_a_ranker_are_metrics_over_their_rows():
    pipeline, model, rows = a_ranker()
    _, results = look(pipeline, model, rows[:4], rows[4:])
    ranges = [(0, 0), (1, 10), (11, 40)]
    assert [(item.shortest, item.longest) for item in results.slices] == ranges
    for item, (first, last) in zip(results.slices, ranges, strict=True):
        mine = [row for row in rows if first <= len(row.uih_timestamps) <= last and row.weight]
        assert item.rows == len(mine)
        assert item.candidates == sum(len(row.candidate_timestamps) for row in mine)
        clicks, errors, total, weighed = [], 0.0, 0.0, 0.0
        for row in mine:
            if not row.candidate_timestamps:
                continue
            with torch.no_grad():
                said = model(batch_of(pipeline, [row])).predictions
            for p, y in zip(said["click"].tolist(), row.labels["click"], strict=True):
                clicks.append((p, y, row.weight))
                total -= row.weight * math.log(p if y else 1 - p)
                weighed += row.weight
            for p, y in zip(said["seconds"].tolist(), row.labels["seconds"], strict=True):
                errors += row.weight * abs(p - y)
        assert item.metrics["click/log_loss"] == pytest.approx(total / weighed, rel=1e-4)
        assert item.metrics["seconds/mae"] == pytest.approx(errors / weighed, rel=1e-4)
        pairs = [
            ((p > q) + (p == q) / 2, v * w) for p, y, v in clicks for q, z, w in clicks if y == 1 and z == 0
        ]
        weight = sum(w for _, w in pairs)
        assert item.metrics["click/auc"] == pytest.approx(sum(x * w for x, w in pairs) / weight, rel=1e-6)


def test_calibration_is_of_the_binary_tasks_and_all_candidates():
    pipeline, model, rows = a_ranker()
    _, results = look(pipeline, model, rows)
    assert list(results.calibration) == ["click"]
    with torch.no_grad():
        predictions = model(batch_of(pipeline, rows)).predictions["click"].tolist()
    labels = [y for row in rows for y in row.labels["click"]]
    weights = [row.weight for row in rows for _ in row.labels["click"]]
    kept = [(p, y, w) for p, y, w in zip(predictions, labels, weights, strict=True) if w]
    bins = results.calibration["click"]
    assert sum(item.candidates for item in bins) == len(kept)
    # Bins follow each other in the order of predictions: each is a run of the sorted candidates.
    ordered = iter(sorted(kept))
    for item in bins:
        part = [next(ordered) for _ in range(item.candidates)]
        weight = sum(w for *_, w in part)
        assert item.predicted == pytest.approx(sum(p * w for p, _, w in part) / weight, rel=1e-6)
        assert item.observed == pytest.approx(sum(y * w for _, y, w in part) / weight)


def test_slices_of_a_retriever_are_metrics_over_their_queries():
    pipeline = pipeline_of(RETRIEVER, WIDE)
    torch.manual_seed(5)
    model = build_model(pipeline).eval()
    rows = random_rows(pipeline, [(1, 1), (15, 1), (10, 1), (33, 1), (8, 1)])
    _, results = look(pipeline, model, rows[:2], rows[2:])
    with torch.no_grad():
        batch = batch_of(pipeline, rows)
        ranks = model.ranks(model(batch), batch).tolist()
    assert results.calibration == {}
    nobody, short, long = results.slices
    assert (nobody.rows, nobody.candidates, short.rows, long.candidates) == (0, 0, 3, 2)
    assert all(math.isnan(value) for value in nobody.metrics.values())
    for part, picked in ((short, [0, 2, 4]), (long, [1, 3])):
        mine = [ranks[number] for number in picked]
        assert part.metrics["mrr"] == pytest.approx(sum(1 / rank for rank in mine) / len(mine))
        assert part.metrics["hit_rate@5"] == pytest.approx(sum(rank <= 5 for rank in mine) / len(mine))


def test_looking_closer_changes_no_metric():
    pipeline, model, rows = a_ranker()
    plain = evaluate(model, loader_of(pipeline, rows[:5], rows[5:]), CPU)
    metrics, results = look(pipeline, model, rows[:5], rows[5:], pictures=2)
    assert metrics == plain
    assert [(item.sample, item.layer) for item in results.pictures] == [
        (f"row {row}", layer) for layer in (1, 2) for row in (3, 2)
    ]
    assert look(pipeline, model, rows)[1].pictures == []


def test_nothing_undefined_is_written_as_a_number():
    pipeline, model, rows = a_ranker()
    with_one_class = [row.changed(labels={"click": [0.0] * 4, "seconds": [1.0] * 4}) for row in rows[6:7]]
    actual = look(pipeline, model, with_one_class)[1].to_json()
    assert [entry["rows"] for entry in actual["slices"]] == [0, 0, 1]
    assert actual["slices"][2]["history"] == [11, 40]
    assert math.isnan(actual["slices"][2]["metrics"]["click/auc"])
    assert {entry["observed"] for entry in actual["calibration"]["click"]} == {0.0}
    json.dumps(actual)


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found_by(rank), file)
    dist.barrier()
    dist.destroy_process_group()


def found_by(rank: int | None) -> dict:
    """Rank 0 has the rows without history and all but one of the others; rank 1 one row, in a long slice."""
    pipeline, model, rows = a_ranker()
    mine = {None: rows, 0: rows[:-1], 1: rows[-1:]}[rank]
    return look(pipeline, model, mine)[1].to_json()


def test_two_ranks_find_what_one_does(tmp_path):
    run_ranks(work, str(tmp_path))
    expected = json.dumps(found_by(None))
    for rank in (0, 1):
        actual = json.loads((tmp_path / f"{rank}.json").read_text())
        assert flat(actual) == pytest.approx(flat(json.loads(expected)), rel=1e-6, nan_ok=True)


def flat(value, path="") -> dict:
    """Numbers of nested JSON by their paths."""
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, entry in pairs for k, v in flat(entry, f"{path}/{key}").items()}
    return {path: value}
