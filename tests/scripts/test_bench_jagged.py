"""The benchmark of the ops that move rows, tiny, on a CPU: what it writes, what it refuses to time."""

import json

import torch

from scripts import bench_jagged

CONTEXT = bench_jagged.Context("cpu", "reference", "abc", 1)
NAMES = ["assemble 3 sources", "assemble 4 sources", "channels", "truncate", "embed", "embed hot"]


def make(place):
    return lambda size: bench_jagged.cases(size, 4, torch.float32, "cpu", "reference")[place]


def test_it_writes_a_record_a_pass_and_way(tmp_path, capsys):
    path = tmp_path / "new" / "record.json"
    arguments = ["--backend", "reference", "--repeats", "1", "--case", "float32", "--record", str(path)]
    assert bench_jagged.main(arguments) == 0
    records = json.loads(path.read_text())
    ways = [("reference", "fwd"), ("reference", "bwd"), ("PyTorch", "fwd"), ("PyTorch", "bwd")]
    assert [(r["backend"], r["pass"]) for r in records] == ways * len(NAMES)
    assert [r["shape"] for r in records[::4]] == [f"{name} T2048 E8 float32" for name in NAMES]
    assert all(r["ok"] and r["ms"] > 0 and r["tb_s"] > 0 for r in records)
    assert "embed hot" in capsys.readouterr().out


def test_bytes_are_those_of_the_rows():
    channels, truncate = make(2)(2048), make(3)(2048)
    kept = truncate.ours(*truncate.leaves).shape[0]
    assert truncate.moved == (2 * kept * 16, (kept + truncate.leaves[0].shape[0]) * 16)
    rows = channels.ours(*channels.leaves).shape[0]
    assert channels.moved == (2 * rows * 16, (rows + channels.leaves[0].shape[0]) * 16)


def test_what_is_wrong_is_not_timed(capsys):
    for place in range(len(NAMES)):

        def wrong(size, place=place):
            case = make(place)(size)
            return case._replace(ours=lambda *leaves: case.ours(*leaves) * 1.001)

        (record,) = bench_jagged.bench(wrong, 2048, "here", CONTEXT)
        assert not record.ok and record.ms is None
    assert capsys.readouterr().err.count("times the allowed error") == len(NAMES)


def test_a_backend_that_cannot_run_is_a_wrong_case(capsys):
    def triton(size):
        return bench_jagged.cases(size, 4, torch.float32, "cpu", "triton")[0]

    assert not any(record.ok for record in bench_jagged.bench(triton, 2048, "here", CONTEXT))
    assert "triton" in capsys.readouterr().err
