"""The benchmark at tiny sizes: both forms compute the same, and it fails when a bar is missed."""

import multiprocessing.dummy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts import bench_cpu
from scripts.bench_cpu import Result


@pytest.mark.parametrize("path", [bench_cpu.RANKING, bench_cpu.RETRIEVAL])
def test_a_step_is_compared_on_real_batches(path, tmp_path):
    text = Path(path).read_text(encoding="utf-8")
    short = tmp_path / "short.config"
    short.write_text(re.sub(r"\bbatch_size: \d+", "batch_size: 8", text, count=1), encoding="utf-8")
    result = bench_cpu.bench_step(tmp_path, name="step", path=str(short), num_batches=1, repeats=1)
    assert 0.05 < result.value < 50 and result.bar == 1.0 and result.unit == "x"
    ours, padded = (float(part.split()[-2]) for part in result.detail.split(",")[:2])
    assert result.value == pytest.approx(padded / ours, rel=0.05)


def test_forms_that_differ_are_not_timed():
    class Off(torch.nn.Linear):
        def forward(self, x):
            out = super().forward(x).sum(0, keepdim=True)
            return bench_cpu.Losses(("a",), out[0], torch.ones(1), (1.0,))

    first, second = Off(3, 1), Off(3, 1)
    batch = torch.rand(4, 3)
    bench_cpu.check_same_gradients(first, batch, first, batch)
    with pytest.raises(AssertionError):
        bench_cpu.check_same_gradients(first, batch, second, batch)


def test_the_package_is_imported_by_a_fresh_process():
    result = bench_cpu.bench_import(Path("."), repeats=1)
    assert 0 < result.value and result.good and result.unit == "s"


def test_a_missed_bar_fails(monkeypatch, capsys):
    results = {
        "fast": Result("fast", "1 row", 0.5, bar=0.5),
        "slow": Result("slow", "2 rows", 0.49, bar=0.5),
        "short": Result("short", "3 rows", 1.0, bar=1.0, unit="s"),
        "long": Result("long", "4 rows", 1.01, bar=1.0, unit="s"),
    }
    sections = {name: lambda folder, result=result: result for name, result in results.items()}
    monkeypatch.setattr(bench_cpu, "SECTIONS", sections)
    assert bench_cpu.main(["fast", "short"]) == 0
    assert "MISSED" not in capsys.readouterr().out
    assert bench_cpu.main(["fast", "slow"]) == 1
    assert bench_cpu.main(["long"]) == 1
    assert bench_cpu.main([]) == 1
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == list(results)
    assert ["MISSED" in line for line in lines] == [False, True, False, True]
    assert lines[1].split()[1:6] == ["0.49", "x", ">=", "0.5", "x"]


@pytest.mark.parametrize("separate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_reader_is_measured_against_plain_pyarrow(separate, tmp_path, monkeypatch):
    """A process for pyarrow imports for seconds; without `--slow` a thread takes its place."""
    if not separate:
        threads = SimpleNamespace(get_context=lambda method: multiprocessing.dummy)
        monkeypatch.setattr(bench_cpu, "multiprocessing", threads)
        monkeypatch.setattr(bench_cpu, "_set_threads", lambda count: None)
    monkeypatch.setattr(bench_cpu, "READER_ROWS", 3072)
    monkeypatch.setattr(bench_cpu, "READER_REPEATS", 1)
    result = bench_cpu.bench_reader(tmp_path)
    ours, dataset, file = (float(part.replace(",", "")) for part in re.findall(r"[\d,]+\d", result.detail))
    assert result.value == pytest.approx(ours / max(dataset, file), rel=0.01) and result.bar == 0.5
