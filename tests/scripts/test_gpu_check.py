"""`scripts/gpu_check`: what it runs, with a python that only takes notes; and the one form of all records."""

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from scripts import bench_jagged, bench_logp, bench_ops, bench_serving, bench_step, bench_topk, gpu_records
from scripts.bench_records import as_json

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
NOTING_PYTHON = """#!/bin/sh
echo "$@" >>"{folder}/calls"
case "$*" in *"{broken}"*) exit 1;; esac
"""
ALL = ["ops", "stu", "logp", "topk", "jagged", "step", "serving"]


def check(folder, *arguments, broken="nothing of it", **environment):
    """The exit code, and the calls of python."""
    python = folder / "python"
    python.write_text(NOTING_PYTHON.format(folder=folder, broken=broken))
    python.chmod(0o755)
    command = [BASH, "scripts/gpu_check", str(folder / "out"), *arguments]
    variables = {"PYTHON": str(python), "PATH": "/usr/bin:/bin"} | environment
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


def benches(calls):
    return [actual[1] for call in calls if (actual := re.match(r"scripts/bench_(\w+)\.py ", call))]


def test_it_runs_the_gpu_tests_and_every_benchmark_into_one_folder(tmp_path):
    code, calls = check(tmp_path, "abc1234")
    assert code == 0
    (tests,) = (call for call in calls if call.startswith("-m pytest"))
    folders = "tests/ops tests/modules tests/models tests/inference tests/scoring tests/training"
    assert tests.endswith(f"{folders} -m gpu")
    assert benches(calls) == ALL
    for call in calls:
        if name := benches([call]):
            assert call.endswith(f"--commit abc1234 --record {tmp_path}/out/{name[0]}.json")
    assert calls[-1] == f"scripts/gpu_records.py {tmp_path}/out"


@pytest.mark.parametrize("broken", ["-m pytest", "bench_logp", "gpu_records", "import pytest"])
def test_a_part_that_fails_is_the_exit_code_and_the_others_run(tmp_path, broken):
    code, calls = check(tmp_path, broken=broken)
    assert code == 1
    assert benches(calls) == ALL
    assert not any("--commit" in call for call in calls)


def test_a_part_can_be_chosen(tmp_path):
    code, calls = check(tmp_path, ONLY="stu step")
    assert code == 0
    assert benches(calls) == ["stu", "step"]
    assert not any(call.startswith("-m pytest") for call in calls)


@pytest.mark.parametrize(("cores", "workers"), [(3, 3), (200, 56)])
def test_tests_alone_in_a_process_for_each_core(cores, workers, tmp_path):
    for name, says in (("nproc", f"${{OMP_NUM_THREADS:-{cores}}}"), ("nvidia-smi", "Some GPU, 1.2")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    code, calls = check(tmp_path, "abc1234", ONLY="tests", PATH=path, OMP_NUM_THREADS="1")
    assert code == 0
    assert calls[-2:] == ["-m recsys.doctor --version", calls[-1]]  # and nothing to put together
    assert f" -n {workers} --dist worksteal " in calls[-1]
    assert (tmp_path / "out" / "tests.log").read_text() == "commit abc1234\nSome GPU, 1.2\n"


def test_every_test_for_a_gpu_stands_where_it_looks():
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    places = {
        path.relative_to(ROOT / "tests").parts[0] for path in marked if path.name != Path(__file__).name
    }
    assert places == {"ops", "modules", "models", "inference", "scoring", "training"}


def example(record, **changes):
    """A record as a benchmark makes it: every field is there."""
    known = {field.name: None for field in fields(record)} | {"ok": True, "commit": "abc"} | changes
    return as_json(record(**{name: known[name] for name in (field.name for field in fields(record))}))


def test_all_benchmarks_end_in_one_form(tmp_path, capsys):
    plain = {"backend": "triton", "shape": "B2 L3 D4", "direction": "bwd", "ms": 2.0, "tflops": 1.5}
    step = {"variant": "full", "backend": "auto", "history": 8192, "batch": 8, "num_layers": 6}
    serving = {"variant": "full", "backend": "auto", "history": 4096, "rows": 8, "candidates": 2048}
    search = {"backend": "sm90", "dtype": "bfloat16", "items": 10**7, "dim": 128, "queries": 4096, "k": 10}
    written = {
        "ops": [example(bench_ops.Record, op="hstu_attention", peak_mb=7.0, **plain)],
        "logp": [
            example(bench_logp.Record, op="linear_logp", extra_mb=9.0, **plain),
            example(bench_logp.Record, op="linear_logp", **{**plain, "ms": None, "ok": False}),
        ],
        "topk": [
            example(bench_topk.Record, search="exact", milliseconds=20.0, extra_mib=300.0, **search),
            example(bench_topk.Record, search="HNSW32", milliseconds=9.0, **{**search, "backend": None}),
        ],
        "jagged": [
            example(bench_jagged.Record, op="gather_rows", tb_s=3.0, **{**plain, "tflops": 0}),
        ],
        "step": [example(bench_step.Record, ms=80.0, tflops=250.0, peak_mb=9e3, embedding_dim=256, **step)],
        "serving": [
            example(bench_serving.Record, uncached_ms=9.0, cached_ms=4.0, **serving),
            example(bench_serving.Record, **{**serving, "variant": "channels", "ok": False}),
        ],
    }
    for name, entries in written.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(entries))
    assert gpu_records.main([str(tmp_path)]) == 1  # some are wrong
    actual = json.loads((tmp_path / "record.json").read_text())
    assert all(list(entry) == list(gpu_records.FIELDS) for entry in actual)
    lines = [tuple(entry[field] for field in gpu_records.FIELDS[:8]) for entry in actual]
    assert lines == [
        ("hstu_attention", "triton", "B2 L3 D4", "bwd", 2.0, 1.5, 7.0, True),
        ("linear_logp", "triton", "B2 L3 D4", "bwd", 2.0, 1.5, 9.0, True),
        ("linear_logp", "triton", "B2 L3 D4", "bwd", None, 1.5, None, False),
        # 2 x 4096 x 10^7 x 128 FLOP in 20 ms.
        ("top_k", "sm90", "B4096 V10000000 D128 k10 bfloat16", "fwd", 20.0, 524.288, 300.0, True),
        ("gather_rows", "triton", "B2 L3 D4", "bwd", 2.0, None, None, True),
        ("training_step", "auto", "full B8 L8192 E256 6 layers", "fwd+bwd", 80.0, 250.0, 9e3, True),
        ("scoring", "auto", "full B8 L4096 candidates 2048, uncached", "fwd", 9.0, None, None, True),
        ("scoring", "auto", "full B8 L4096 candidates 2048, cached", "fwd", 4.0, None, None, True),
        ("scoring", "auto", "channels B8 L4096 candidates 2048", "fwd", None, None, None, False),
    ]
    assert "WRONG: linear_logp triton B2 L3 D4 bwd" in capsys.readouterr().err


def test_nothing_to_put_together_is_named(tmp_path, capsys):
    assert gpu_records.main([str(tmp_path)]) == 1
    assert "there is nothing to merge; expected ops.json, stu.json" in capsys.readouterr().err
