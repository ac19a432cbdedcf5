"""recsys.install: the row it picks, what it removes, and a stand-in wheel that a real pip accepts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from recsys import environment, install
from recsys.errors import InstallationError

ROOT = Path(__file__).resolve().parents[1]
BARE = {
    "torch": None,
    "fbgemm": None,
    "fbgemm_cpu": None,
    "driver": None,
    "system": "Linux x86_64",
}


def plan(**facts):
    return install.make_plan(**{**BARE, **facts})


@pytest.mark.parametrize(
    ("torch", "fbgemm", "torchrec"),
    [("2.11.0", "1.6.0", "1.6.1"), ("2.12.1+cu130", "1.7.0", "1.7.0"), ("2.13.0", "1.8.0", "1.8.0")],
)
def test_an_installed_torch_is_kept_and_decides_the_row(torch, fbgemm, torchrec):
    chosen = plan(torch=torch, driver="570.86")
    assert chosen.install[:3] == [f"torch=={torch}", f"torchrec=={torchrec}", f"fbgemm-gpu=={fbgemm}"]
    assert chosen.alias is None


def test_a_bare_machine_gets_the_newest_row_behind_a_stand_in():
    chosen = plan()
    assert chosen.install[:2] == ["torch==2.13.0", "torchrec==1.8.0"]
    assert chosen.install[2:] == [str(chosen.alias)]
    assert chosen.alias.name == "fbgemm_gpu-1.8.0+cpu-py3-none-any.whl"
    assert plan(package=["--editable", ".[dev]"]).install[3:] == ["--editable", ".[dev]"]


def test_a_machine_with_a_driver_gets_what_its_kernels_want():
    chosen = plan(driver="570.86")
    assert chosen.install == [
        "torch==2.11.0",
        "torchrec==1.6.1",
        "fbgemm-gpu==1.6.0",
        "nvidia-cuda-nvcc>=13.3",
    ]
    assert "tested on GPUs" in chosen.reasons[0]
    kept = plan(torch="2.13.0", driver="570.86")
    assert "nvidia-cuda-nvcc>=13.3" in kept.install and "need torch 2.11" in kept.reasons[1]
    assert "nvidia-cuda-nvcc>=13.3" not in plan(torch="2.13.0+cpu", driver="570.86").install


def test_the_extra_for_gpus_is_what_a_machine_with_a_driver_gets():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extra,) = re.findall(r"^gpu = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert sorted(re.findall(r'"(.*)"', extra)) == sorted(plan(driver="570.86").install)


def test_a_cpu_torch_on_a_machine_with_a_driver_gets_the_cpu_build():
    assert plan(torch="2.13.0+cpu", driver="570.86").alias is not None


@pytest.mark.parametrize("torch", ["2.10.0", "2.14.0", "3.0.0"])
def test_an_untested_torch_is_refused_with_the_way_out(torch):
    with pytest.raises(InstallationError, match=r"only 2\.11, 2\.12, 2\.13 are tested.*pip uninstall torch"):
        plan(torch=torch)


@pytest.mark.parametrize("system", ["Darwin arm64", "Windows AMD64"])
def test_a_system_without_wheels_is_refused(system):
    with pytest.raises(InstallationError, match=system):
        plan(system=system)


@pytest.mark.parametrize(
    ("facts", "removed"),
    [
        (
            {"driver": "570.86", "fbgemm": "1.8.0+cpu", "fbgemm_cpu": "1.8.0"},
            ["fbgemm-gpu", "fbgemm-gpu-cpu"],
        ),
        ({"driver": None, "fbgemm": "1.8.0"}, ["fbgemm-gpu"]),
        ({"driver": None, "fbgemm": "1.8.0+cpu", "fbgemm_cpu": "1.8.0"}, []),
        ({"driver": "570.86", "fbgemm": "1.8.0"}, []),
    ],
)
def test_the_other_build_of_fbgemm_is_removed_first(facts, removed):
    assert plan(**facts).uninstall == removed


def test_pip_accepts_the_stand_in_and_sees_what_it_requires(tmp_path):
    wheel = tmp_path / "fbgemm_gpu-1.8.0+cpu-py3-none-any.whl"
    install.write_alias_wheel(wheel)
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(pip, check=True)
    code = (
        "from importlib.metadata import distribution as d; x = d('fbgemm-gpu'); print(x.version, *x.requires)"
    )
    shown = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    version, requirement = shown.stdout.split()
    assert version == "1.8.0+cpu"
    assert Requirement(requirement) == Requirement("fbgemm-gpu-cpu==1.8.0")
    # torchrec asks for the bare name, a row of the table for an exact version: both are satisfied.
    assert Requirement("fbgemm-gpu==1.8.0").specifier.contains(version)


def test_a_folder_that_cannot_be_written_asks_for_a_virtual_environment(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InstallationError, match=r"Use a virtual environment: python3 -m venv"):
        install.write_alias_wheel(tmp_path / "file" / "fbgemm_gpu-1.8.0+cpu-py3-none-any.whl")


def test_an_installed_wheel_installs_its_libraries_and_not_a_clone(monkeypatch, capsys):
    monkeypatch.setattr(install.resources, "clone", lambda: None)
    assert install.main(["--dry-run"]) == 0
    assert "-m pip install torch==" in (said := capsys.readouterr().out) and "--editable" not in said
    assert install.main(["--dry-run", "--skip-doctor"]) == 0
    assert capsys.readouterr().out == said.replace(said.splitlines()[-1] + "\n", ""), "all but the last line"
    with pytest.raises(SystemExit, match="2"):
        install.main(["--dev"])


def test_dry_run_prints_the_pip_line_and_changes_nothing():
    before = environment.versions()
    command = [sys.executable, ROOT / "scripts" / "install.py", "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "-m pip install torch==" in shown.stdout and "--editable ." in shown.stdout
    assert shown.stdout.rstrip().endswith("-m recsys.doctor --quick")
    assert environment.versions() == before


def test_an_unknown_flag_is_an_error():
    command = [sys.executable, ROOT / "scripts" / "install.py", "--develop-all"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "--develop-all" in shown.stderr
