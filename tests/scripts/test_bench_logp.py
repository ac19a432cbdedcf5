"""The benchmark of `linear_logp` at a tiny size on a CPU: what it writes, what it refuses to time."""

import json

import torch

from scripts import bench_logp

CASE = bench_logp.Case(40, 300, 16)


def test_it_writes_a_record_a_pass_and_way(tmp_path, capsys):
    path = tmp_path / "new" / "record.json"
    assert bench_logp.main(["--backend", "reference", "--repeats", "2", "--record", str(path)]) == 0
    records = json.loads(path.read_text())
    assert [(r["backend"], r["pass"]) for r in records] == [
        ("reference", "fwd"),
        ("reference", "fwd+bwd"),
        ("chunked PyTorch", "fwd"),
        ("chunked PyTorch", "fwd+bwd"),
        ("held scores", "fwd"),
        ("held scores", "fwd+bwd"),
    ]
    assert all(r["ok"] and r["ms"] > 0 and r["shape"] == CASE.shape for r in records)
    assert CASE.shape in capsys.readouterr().out


def test_the_ways_it_is_compared_with_compute_the_same():
    inputs = bench_logp.make_inputs(CASE, "cpu", seed=3)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs.leaves]
    exact = bench_logp.Inputs(wide[0], wide[1], inputs.target, inputs.cotangents)
    want = bench_logp.by_scores(exact)[0]
    for way in (bench_logp.by_chunks, bench_logp.by_held):
        torch.testing.assert_close(way(exact)[0].double(), want, rtol=1e-5, atol=1e-5)


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    right = bench_logp.by_op

    def of_others(inputs, backend):
        return right(inputs._replace(target=inputs.target.roll(1)), backend)

    monkeypatch.setattr(bench_logp, "by_op", of_others)
    (record,) = bench_logp.bench(CASE, "cpu", "reference", "abc", repeats=1)
    assert not record.ok and record.ms is None
    assert "times the allowed error" in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_a_wrong_case(capsys):
    records = bench_logp.bench(CASE, "cpu", "triton", "abc", repeats=1)
    assert not any(record.ok for record in records)
    assert "triton" in capsys.readouterr().err
