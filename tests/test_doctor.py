"""`recsys.doctor` explains broken installations and passes this one."""

import sys

import pytest

from recsys import doctor, doctor_checks
from recsys.ops.runtime import dispatch

RIGHT = {"torch": "2.13.0+cpu", "fbgemm-gpu": "1.8.0+cpu", "torchrec": "1.8.0", "torchmetrics": "1.0.3"}


def states(findings):
    return {finding.name: finding.state for finding in findings}


def test_a_tested_row_is_right():
    actual = states(doctor_checks.check_versions(RIGHT))
    assert actual == {"torch": "ok", "fbgemm-gpu": "ok", "torchrec": "ok", "torchmetrics": "ok"}


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"fbgemm-gpu": "1.7.0"}, "fbgemm-gpu"),
        ({"torchrec": "1.9.2"}, "torchrec"),
        ({"torchrec": None}, "torchrec"),
        ({"torchmetrics": "1.9.0"}, "torchmetrics"),
        ({"torch": "2.10.0"}, "torch"),
        ({"torch": None}, "torch"),
    ],
)
def test_a_version_outside_the_row_is_an_error_with_a_remedy(change, culprit):
    versions = {name: version for name, version in {**RIGHT, **change}.items() if version is not None}
    (error,) = [f for f in doctor_checks.check_versions(versions) if f.state == "error"]
    assert error.name == culprit
    assert "-m recsys.install" in error.remedy


@pytest.mark.parametrize(
    ("fbgemm", "driver", "state"),
    [
        ("1.8.0", "570.86", "ok"),
        ("1.8.0+cpu", None, "ok"),
        ("1.8.0+cpu", "570.86", "warning"),
        ("1.8.0", None, "error"),
    ],
)
def test_the_build_of_fbgemm_must_fit_the_driver(fbgemm, driver, state):
    (finding,) = doctor_checks.check_driver({**RIGHT, "fbgemm-gpu": fbgemm}, driver)
    assert finding.state == state
    assert bool(finding.remedy) == (state != "ok")


def test_a_gpu_without_use_because_torch_is_a_cpu_build_names_torch():
    (finding,) = doctor_checks.check_driver(RIGHT, "570.86")
    assert "uninstall -y torch" in finding.remedy


@pytest.mark.parametrize(
    ("shown", "state"), [("12.8", "warning"), ("13.3", "ok"), ("13.5", "ok"), ("", "warning")]
)
def test_an_old_ptxas_is_a_warning(monkeypatch, shown, state):
    monkeypatch.setattr(doctor_checks.environment, "driver_version", lambda: "570.86")
    monkeypatch.setattr(doctor_checks.environment, "find_ptxas", lambda: "/some/ptxas")
    monkeypatch.setattr(doctor_checks.environment, "tool_version", lambda path: shown)
    (finding,) = doctor_checks.check_ptxas()
    assert finding.state == state


def test_a_ptxas_that_is_not_there_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_checks.environment, "driver_version", lambda: "570.86")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    (finding,) = doctor_checks.check_ptxas()
    assert finding.state == "warning"
    assert finding.detail.startswith(f"TRITON_PTXAS_PATH names {tmp_path / 'ptxas'}, which cannot be run")
    assert finding.remedy == "unset TRITON_PTXAS_PATH; pip install 'nvidia-cuda-nvcc>=13.3'"


def test_no_compiler_is_a_warning_with_a_remedy():
    finding = doctor_checks.check_compiler(None)
    assert (finding.state, finding.remedy) == ("warning", "apt install g++")


def test_what_a_check_raises_becomes_an_error():
    def broken():
        raise OSError("libfoo.so: undefined symbol: bar\nmore")

    assert doctor_checks.attempt("x", broken, "do this") == doctor_checks.CheckResult(
        "error", "x", "OSError: libfoo.so: undefined symbol: bar", "do this"
    )


def test_a_torchrec_that_cannot_be_imported_is_named_by_its_cause(tmp_path, monkeypatch):
    (tmp_path / "torchrec.py").write_text("raise OSError('libnvidia-ml.so.1: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchrec", raising=False)
    finding = doctor_checks.attempt("fbgemm", doctor_checks.environment.import_torchrec_quietly, "do this")
    assert (finding.state, finding.remedy) == ("error", "do this")
    assert finding.detail == "OSError: libnvidia-ml.so.1: cannot open"


def test_a_wrong_result_is_an_error(monkeypatch):
    import torch

    doctor_checks.environment.import_torchrec_quietly()
    monkeypatch.setattr(torch.ops.fbgemm, "asynchronous_complete_cumsum", lambda lengths: lengths)
    finding = doctor_checks.attempt("fbgemm", doctor_checks.run_fbgemm, "reinstall")
    assert finding.state == "error"
    assert "3, 0, 2" in finding.detail


def test_exit_code_5_and_the_line_to_type(monkeypatch, capsys):
    findings = [
        doctor_checks.CheckResult("warning", "compiler", "none", "apt install g++"),
        doctor_checks.CheckResult("error", "torch", "not installed", "python -m recsys.install"),
    ]
    monkeypatch.setattr(doctor, "diagnose", lambda quick: iter(findings))
    assert doctor.main([]) == 5
    assert capsys.readouterr().out.endswith("Type:\n  python -m recsys.install\n")
    monkeypatch.setattr(doctor, "diagnose", lambda quick: iter(findings[:1]))
    assert doctor.main([]) == 0


def test_this_installation_is_ready(capsys):
    """In this process, which has the libraries; `scripts/test` runs the command after an installation."""
    assert doctor.main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert "hstu_attention" in said and "reference" in said
    assert said.endswith("ready\n")


def test_every_op_is_explained():
    shown = doctor_checks.explain_ops()
    for op in dispatch._OPS:
        assert shown.count(f"torch.float32: {op}\n") == shown.count(f"torch.bfloat16: {op}\n") == 1


def test_an_unknown_flag_is_a_usage_error():
    with pytest.raises(SystemExit) as stopped:
        doctor.main(["--quik"])
    assert stopped.value.code == 2


@pytest.mark.slow
def test_a_package_compiles_and_runs_without_a_word_of_the_libraries_about_themselves(recwarn):
    assert doctor_checks.attempt("package", doctor_checks.compile_a_package, "").state == "ok"
    assert not [str(item.message) for item in recwarn if item.category is FutureWarning]
