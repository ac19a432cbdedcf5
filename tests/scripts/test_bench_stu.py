"""The benchmark of a layer at tiny sizes on a CPU: what it counts, what it refuses, what it writes."""

import json
from functools import partial

import torch

from recsys.modules import stu_paths
from recsys.modules.stu import STULayer
from scripts import bench_stu


def test_it_adds_to_a_record(tmp_path, capsys, monkeypatch):
    # Inductor would take seconds for code that tests/modules/test_stu.py compiles, too.
    traced = partial(torch.compile, stu_paths._front, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(stu_paths, "_compiled_front", traced)
    path = tmp_path / "record.json"
    path.write_text(json.dumps([{"op": "other"}]))
    assert bench_stu.main(["--record", str(path), "--commit", "abc"]) == 0
    known, plain, compiled = json.loads(path.read_text())
    assert known == {"op": "other"} and compiled["shape"] == "B2 L9 E16 H2 compiled"
    assert (plain["op"], plain["backend"], plain["pass"]) == ("stu_layer", "reference", "fwd+bwd")
    # Two products of weights, 16 x 64 and 16 x 16, and 45 pairs of each of two samples.
    work = 3 * (2 * 18 * (16 * 64 + 16 * 16) + 2 * 2 * 45 * 32)
    assert abs(plain["tflops"] * plain["ms"] * 1e9 / work - 1) < 1e-9
    assert "B2 L9 E16 H2" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    right = STULayer.finish

    def wrong(self, x, u, attended, *rest):
        attended = attended.double().relu().to(attended.dtype) if x.dtype.itemsize < 8 else attended
        return right(self, x, u, attended, *rest)

    monkeypatch.setattr(STULayer, "finish", wrong)
    monkeypatch.setattr(bench_stu, "FACTOR", 0.0)
    assert bench_stu.main([]) == 1
    assert "the layer is wrong" in capsys.readouterr().err
