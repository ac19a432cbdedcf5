"""The package as its users have it: built, installed into a folder, and used far from the clone."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCES = ("recsys", "protos", "configs", "scripts", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def run(command, folder, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Installed:
    """The console command in `site`; the libraries come from the environment of the tests."""

    def __init__(self, site):
        self.site = site

    def __call__(self, folder, *arguments):
        return run([self.site / "bin" / "recsys", *arguments], folder, PYTHONPATH=str(self.site))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of what an sdist of this tree holds, so that neither lacks a file."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        kwargs = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
        copy(ROOT / name, tree / name, **kwargs)
    shutil.rmtree(tree / "recsys" / "protos")
    build = "import build_backend, sys; print(build_backend.build_{}(sys.argv[1]))"
    run([sys.executable, "-c", build.format("sdist"), dist], tree, PYTHONPATH="scripts")
    shutil.unpack_archive(next(dist.glob("*.tar.gz")), dist)
    unpacked = next(path for path in dist.iterdir() if path.is_dir())
    run([sys.executable, "-c", build.format("wheel"), dist], unpacked, PYTHONPATH="scripts")
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def recsys(wheel, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    run([*pip, "--target", site, wheel], site)
    return Installed(site)


@pytest.fixture(scope="module")
def project(recsys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    recsys(folder, "init", "my_project")
    return folder / "my_project"


def test_the_wheel_holds_what_a_user_needs_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = {"recsys/py.typed", "recsys/sample/events.csv", "recsys/sample/LICENSE"}
    expected |= {f"recsys/protos/{path.name}" for path in (ROOT / "protos").glob("*.proto")}
    expected |= {f"recsys/protos/{path.stem}_pb2.py" for path in (ROOT / "protos").glob("*.proto")}
    expected |= {f"recsys/ready_configs/{path.name}" for path in (ROOT / "configs").glob("*.config")}
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "recsys").rglob("*.py")]
    expected |= {name for name in modules if not name.startswith("recsys/protos/")}
    assert expected <= set(names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"recsys", "generative_recsys"}


def test_nothing_of_it_pulls_in_a_torch_that_does_not_fit(wheel):
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    core = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", text, re.MULTILINE)
    assert "polars" in core and not {"torch", "torchrec", "torchmetrics", "fbgemm-gpu"} & set(core)


def test_the_project_that_init_makes_is_right_outside_the_clone(project, recsys):
    assert recsys(project, "train", "--config", "sample/starter.config", "--validate") == "ok\n"
    listed = recsys(project, "init", "--help")
    assert "ml_1m_hstu" in listed and "quickstart" not in listed


@pytest.mark.slow
def test_the_commands_of_its_readme_run_outside_the_clone(project, recsys):
    readme = (project / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^recsys (.*)", readme, re.MULTILINE)
    train, evaluate, export, predict = (shlex.split(line) for line in lines[:4])
    said = recsys(project, *train, "--set", "train.num_steps=4", "--set", "data.num_workers=1")
    assert "all 4 steps are done" in said
    assert "click/auc" in recsys(project, *evaluate)
    (snippet,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert "1_374" in run([sys.executable, "-c", snippet], project, PYTHONPATH=str(recsys.site))
    recsys(project, *export)
    recsys(project, *predict)
    assert list((project / "runs/sample/predictions").glob("*.parquet"))
