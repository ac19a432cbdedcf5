"""The benchmark of the ops at tiny sizes on a CPU: what it counts, what it refuses, what it writes."""

import json
from dataclasses import replace

import pytest
import torch

from recsys.ops import AttentionMask
from scripts import bench_ops
from tests.ops.oracle import Sample, sees


@pytest.mark.parametrize("case", bench_ops.tiny_cases(), ids=lambda case: case.shape)
def test_useful_work_is_that_of_visible_pairs(case):
    pairs, lengths = 0, case.lengths.tolist()
    first = [0] * len(lengths) if case.num_cached is None else case.num_cached.tolist()
    for length, computed in zip(lengths, first, strict=True):
        history = length - case.num_contextual - case.num_targets
        sample = Sample(case.num_contextual, history, case.num_targets)
        pairs += sum(sees(sample, i, j, case.mask) for i in range(computed, length) for j in range(length))
    assert bench_ops.useful_flop(case) == 2 * pairs * (case.dim + case.dim) * case.heads


def test_a_causal_shape_has_the_published_work():
    case = next(case for case in bench_ops.cases() if case.shape == "B32 L4096 D128")
    assert bench_ops.useful_flop(case) == 32 * 4 * (4096 * 4097 / 2) * 4 * 128


@pytest.mark.parametrize(
    ("shape", "ms", "tflops"),
    [("B64 uniform 1..4096 D128", 0.773, 487), ("B512 Pareto 16..2048 D128", 0.348, 133)],
)
def test_ragged_batches_have_the_published_work(shape, ms, tflops):
    """NVIDIA's forward, in time and in speed."""
    case = next(case for case in bench_ops.cases() if case.shape == shape)
    assert bench_ops.useful_flop(case) == pytest.approx(ms * tflops * 1e9, rel=0.004)


def test_names_are_unique_and_every_case_has_a_layout():
    names = [case.shape for case in bench_ops.cases()]
    assert len(names) == len(set(names))
    for case in [*bench_ops.cases(), *bench_ops.tiny_cases()]:
        assert case.layout().total_len == int(case.lengths.sum())


def test_it_writes_a_record_a_pass(tmp_path, capsys):
    path = tmp_path / "new" / "record.json"
    assert bench_ops.main(["--backend", "reference", "--repeats", "2", "--record", str(path)]) == 0
    records = json.loads(path.read_text())
    assert [(r["op"], r["shape"], r["pass"]) for r in records] == [
        ("hstu_attention", "tiny", "fwd"),
        ("hstu_attention", "tiny", "bwd"),
        ("hstu_attention", "tiny bias", "fwd"),
        ("hstu_attention", "tiny bias", "bwd"),
        ("hstu_attention_cached", "tiny cached bias", "fwd"),
    ]
    assert all(r["ok"] and r["ms"] > 0 and r["commit"] for r in records)
    assert set(records[0]) == {"op", "backend", "shape", "pass", "ms", "tflops", "peak_mb", "ok", "commit"}
    assert "tiny bias" in capsys.readouterr().out


@pytest.mark.parametrize("case", bench_ops.tiny_cases(), ids=lambda case: case.shape)
def test_what_is_wrong_is_not_timed(case, monkeypatch):
    right = bench_ops.attend

    def off_by_a_window(case, inputs, layout, backend):
        wrong = isinstance(inputs, bench_ops.CachedInputs) or inputs.q.dtype != torch.float64
        return right(replace(case, mask=AttentionMask(window=2)) if wrong else case, inputs, layout, backend)

    monkeypatch.setattr(bench_ops, "attend", off_by_a_window)
    monkeypatch.setattr(bench_ops, "FACTOR", 0.0)
    answer = bench_ops.compared(case, "cpu", "reference")
    records = bench_ops.bench(case, "cpu", "reference", "abc", 1, answer)
    assert [record.ok for record in records] == [False] * len(case.directions)
    assert all(record.ms is None and record.tflops is None for record in records)


def test_what_fails_is_a_wrong_case(monkeypatch, capsys):
    def fails(*_arguments):
        raise RuntimeError("no such kernel")

    case = bench_ops.tiny_cases()[0]
    monkeypatch.setattr(bench_ops, "widest_error", fails)
    records = bench_ops.bench(case, "cpu", "reference", "a", 1, bench_ops.compared(case, "cpu", "reference"))
    assert [record.ok for record in records] == [False, False]
    assert "no such kernel" in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_passed_over(capsys):
    assert bench_ops.main(["--backend", "triton", "--backend", "reference", "--repeats", "1"]) == 0
    assert "tiny: triton is skipped: it needs" in capsys.readouterr().out


@pytest.mark.slow
def test_several_processes_answer_as_one():
    jobs = [(case, backend) for case in bench_ops.tiny_cases()[1:] for backend in ("reference", "triton")]
    answers = bench_ops.compare_all(jobs, "cpu", workers=2)
    assert answers == bench_ops.compare_all(jobs, "cpu", workers=1)
