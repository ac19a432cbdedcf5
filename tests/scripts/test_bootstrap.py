"""scripts/_bootstrap.sh: when it installs, when it does not, and what it says where Python is too old."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash")
RECORDING_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && cat version || echo "$@" >>calls\n[ ! -e broken ]\n'


@pytest.fixture
def checkout(tmp_path):
    """The files that bootstrap reads, and a `.venv` whose python only records its calls."""
    for name in ("pyproject.toml", "recsys/environment.py", "recsys/install.py", "scripts", "protos"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(RECORDING_PYTHON)
    python.chmod(0o755)
    (tmp_path / "version").write_text("Python 3.11.7\n")
    return tmp_path


def bootstrap(folder, *arguments, **environment):
    script = 'set -euo pipefail; source scripts/_bootstrap.sh; bootstrap "$@"'
    command = [BASH, "-c", script, "bootstrap", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **environment)


def installs(folder):
    calls = folder / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


def test_it_installs_once(checkout):
    for _ in range(3):
        assert bootstrap(checkout).returncode == 0
    assert installs(checkout) == ["scripts/install.py"]


def test_the_dev_install_serves_both_commands_but_not_the_other_way_round(checkout):
    bootstrap(checkout)
    bootstrap(checkout, "--dev")
    bootstrap(checkout, "--dev")
    bootstrap(checkout)
    assert installs(checkout) == ["scripts/install.py", "scripts/install.py --dev"]


@pytest.mark.parametrize("changed", ["pyproject.toml", "protos/model.proto", "recsys/install.py", "version"])
def test_a_change_that_decides_the_install_repeats_it(checkout, changed):
    bootstrap(checkout)
    with (checkout / changed).open("a") as file:
        file.write("# changed\n")
    bootstrap(checkout)
    assert len(installs(checkout)) == 2


def test_a_failed_install_stops_the_script_and_is_tried_again(checkout):
    (checkout / "broken").touch()
    assert bootstrap(checkout).returncode != 0
    (checkout / "broken").unlink()
    assert bootstrap(checkout).returncode == 0
    assert len(installs(checkout)) == 2


def test_without_a_new_enough_python_it_says_so(checkout, tmp_path_factory):
    shutil.rmtree(checkout / ".venv")
    programs = tmp_path_factory.mktemp("bin")
    old = programs / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.18"\nexit 1\n')
    old.chmod(0o755)
    done = bootstrap(checkout, env={"PATH": str(programs)})
    assert done.returncode == 5
    assert "No Python >= 3.10 on PATH (python3 is Python 3.9.18)" in done.stderr
