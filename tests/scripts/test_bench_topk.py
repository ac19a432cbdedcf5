"""The benchmark of top-k at a tiny size: what is wrong is not timed."""

import json

import pytest
import torch

from recsys.ops import TopK, top_k
from scripts import bench_topk

FLAGS = ["--items", "3000", "--dim", "8", "--queries", "20", "--k", "4", "--removed", "3", "--repeats", "2"]


def test_a_line_for_exact_search_and_each_index(tmp_path, capsys):
    pytest.importorskip("faiss")
    path = tmp_path / "new" / "record.json"
    flags = [*FLAGS, "--index", "Flat", "--index", "IVF16,Flat nprobe=2", "--commit", "abc"]
    assert bench_topk.main([*flags, "--record", str(path)]) == 0
    records = json.loads(path.read_text())
    assert [entry["search"] for entry in records] == ["exact", "Flat", "IVF16,Flat nprobe=2"]
    assert [entry["backend"] for entry in records] == ["reference", None, None]
    assert [entry["recall"] for entry in records[:2]] == [None, 1.0]
    assert 0.2 < records[2]["recall"] < 1
    assert all(entry["milliseconds"] > 0 and entry["commit"] == "abc" for entry in records)
    assert capsys.readouterr().out.count("3,000 x 8, 20 queries, top 4: ") == 3


def test_types_and_backends(tmp_path):
    path = tmp_path / "record.json"
    backends = ["--backend", "auto", "--backend", "reference"]
    assert bench_topk.main([*FLAGS, *backends, "--dtype", "bfloat16", "--record", str(path)]) == 0
    records = json.loads(path.read_text())
    assert [(entry["backend"], entry["dtype"]) for entry in records] == [("reference", "bfloat16")] * 2


def test_faults():
    problem = bench_topk.make(500, 8, 5, 3, 2)
    actual = top_k(problem.queries, problem.items, 3, **problem.gone())
    assert bench_topk.fault(problem, actual, exact=True) is None
    worse = top_k(problem.queries, problem.items, 4, **problem.gone())
    second = TopK(worse.scores[:, 1:], worse.items[:, 1:])
    assert bench_topk.fault(problem, second, exact=False) is None
    assert "better items" in bench_topk.fault(problem, second, exact=True)
    twice = TopK(actual.scores[:, [0, 0, 1]], actual.items[:, [0, 0, 1]])
    gone = problem.removed.view(5, 2)
    removed = TopK(torch.zeros(5, 2), gone)
    for wrong in (twice, removed, TopK(actual.scores + 1e-3, actual.items)):
        assert "twice or removed" in bench_topk.fault(problem, wrong, exact=False)


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    def wrong(queries, items, k, **gone):
        actual = top_k(queries, items, k + 1, **gone)
        return TopK(actual.scores[:, 1:], actual.items[:, 1:])

    monkeypatch.setattr(bench_topk, "top_k", wrong)
    assert bench_topk.main(FLAGS) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "exact search, backend reference: query 0: there are better items than those found\n"
