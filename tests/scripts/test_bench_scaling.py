"""The cases of the scaling benchmark are trained on all ranks and compared with one rank."""

import json
from dataclasses import replace

import pytest

from scripts import bench_scaling

SMALL = [
    "model.embedding_dim=16",
    "model.precision=FP32",
    "model.ranker.mixer.hstu={num_layers: 1 qk_dim: 8}",
    "train.sparse_optimizer={row_wise_adagrad {}}",
    "features[1].id.hash.num_buckets=1000",
    "data.num_workers=0",
    "data.batch_size=4",
    "data.max_history_len=8",
    "data.train.synthetic={num_rows: 64 min_history_len: 8 max_history_len: 8 max_candidates: 8}",
]


@pytest.mark.parametrize("case", bench_scaling.CASES)
def test_every_case_is_a_valid_config(case):
    assert bench_scaling.case_of(bench_scaling.BASE, case, []).data.train.synthetic.num_rows


def test_steps_are_measured_and_compared(tmp_path):
    record = tmp_path / "record.json"
    flags = [flag for change in SMALL for flag in ("--set", change)]
    flags += ["--case", "equal", "--steps", "2", "--warmup", "1", "--record", str(record), "--commit", "x"]
    assert bench_scaling.main(flags) == 0
    (entry,) = json.loads(record.read_text())
    # A row has 1 contextual token, 2 for each event, and 1 to 8 candidates.
    tokens = entry["tokens_per_s"] / entry["samples_per_s"]
    assert 1 + 2 * 8 + 1 <= tokens <= 1 + 2 * 8 + 8
    assert entry["samples_per_s"] * entry["ms"] == pytest.approx(4 * 1e3, rel=1e-6)
    assert entry["straggler"] == 1 and entry["efficiency"] is None
    four = replace(bench_scaling.Record(**entry), ranks=4, tflops_per_rank=0.75 * entry["tflops_per_rank"])
    assert bench_scaling.efficiency(four, record) == pytest.approx(0.75)


def test_cases_of_different_lengths_are_measured_with_and_without_balance():
    cases = list(bench_scaling.measured(["equal", "zipf", "equal"], 2))
    assert cases == [("equal", False), ("zipf", False), ("zipf", True)]
    assert list(bench_scaling.measured(["zipf"], 1)) == [("zipf", False)]
