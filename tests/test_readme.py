"""Runs the commands of the README as written, in a folder where a reader could type them.

Each one is in `RUN`, with what is added to make it short, or in `NOT_RUN`, with the reason.
"""

import csv
import gzip
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import one_thread

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

SHORT = (
    "--set train.num_epochs= --set train.num_steps=6 --set train.schedule={} --set data.num_workers=0 "
    "--set train.evaluation.every_steps=6 --set data.batch_size=4"
)
RUN = {
    "python -m recsys.prepare csv --input clicks.csv.gz --output data/clicks --task retrieval "
    "--user-column uid --item-column sku --time-column ts --time-unit ms": "",
    "python -m recsys.train --config data/clicks/starter.config --run-dir runs/clicks": SHORT,
    "python -m recsys.evaluate --run-dir runs/clicks": "",
    # A package takes a minute to compile: the quickstart makes one, and predicts with it.
    "python -m recsys.export --run-dir runs/clicks": "--dry-run",
    "python -m recsys.predict --package runs/clicks/export --input data/clicks/latest "
    "--output runs/clicks/recommendations": "--help",
    "python -m recsys.train --config x.config --validate": "",
    "python -m recsys.train --config x.config --print-config": "",
    "python -m recsys.train --config x.config --dry-run": "--set data.num_workers=0",
    "python -m recsys.train --config x.config --set train.seed=2 --set model.embedding_dim=128": "--validate",
    "torchrun --nproc-per-node 2 -m recsys.train --config x.config": "--validate",
    "python scripts/install.py": "--dry-run",
    "python -m recsys.doctor": "--version",
    "python scripts/config_reference.py": "--check",
}
NOT_RUN = {
    "scripts/quickstart": "tests/scripts/test_quickstart.py",
    "scripts/test": "it is what runs this test",
    "scripts/test --slow": "it is what runs the tests that this one leaves out",
    "python -m recsys.train --config configs/ml_1m_hstu.config --run-dir runs/ml_1m_hstu": "its data is not "
    "bundled; tests/integration/test_ready_configs.py trains every ready config",
    "python -m recsys.evaluate --run-dir runs/ml_1m_hstu": "the same",
    "python scripts/compile_protos.py": "the tests import what it makes",
    "scripts/gpu_check": "it needs a GPU",
}


def commands(text: str) -> list[str]:
    """Command lines of fenced blocks and of code within sentences, without comments and double spaces."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    plain = (re.sub(r"\s+", " ", line.split(" # ")[0].split("  #")[0]).strip() for line in lines)
    return [line for line in plain if re.match(r"(python|torchrun) \S|scripts/\w+( |$)", line)]


def test_every_command_is_run_or_has_a_reason():
    found = commands(README)
    assert len(found) >= 15
    assert set(found) == RUN.keys() | NOT_RUN.keys()


def test_commands_are_found():
    text = "Type `python -m a` or `a.py`.\n\n```\npython b \\\n    --c   # why\n+ python no\n```\n"
    assert commands(text) == ["python b --c", "python -m a"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder like a checkout, with a user's log of clicks and config."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("recsys", "scripts", "tests", "configs", "protos", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "x.config").write_text((ROOT / "configs/quickstart.config").read_text(encoding="utf-8"))
    with gzip.open(folder / "clicks.csv.gz", "wt", newline="") as file:
        csv.writer(file).writerows(clicks())
    return folder


def clicks() -> Iterator[tuple[str, str, str]]:
    """A header, and events of 40 users with up to 20 items, in no order of time."""
    yield "uid", "sku", "ts"
    draw = random.Random(1)
    for user in range(40):
        for _ in range(draw.randint(3, 20)):
            yield f"u{user}", f"sku-{draw.randint(0, 60)}", str(1_700_000_000_000 + draw.randrange(10**9))


@pytest.fixture(scope="module")
def outputs(home) -> dict[str, str]:
    """Output of each command of `RUN`, run in order since they build on each other."""
    found = {}
    for line in commands(README):
        if line in RUN:
            command = [*python(shlex.split(line)), *shlex.split(RUN[line])]
            environment = one_thread() | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=home, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            found[line] = done.stdout + done.stderr
    return found


def python(words: list[str]) -> list[str]:
    """A command line for the Python that runs the tests."""
    program, *rest = words
    return [sys.executable, *(["-m", "torch.distributed.run"] if program == "torchrun" else []), *rest]


def test_commands_run(outputs, home):
    assert outputs.keys() == RUN.keys()
    assert (home / "runs/clicks/report.html").is_file() and (home / "runs/clicks/test_metrics.json").is_file()
    assert "ndcg@10" in outputs["python -m recsys.evaluate --run-dir runs/clicks"]
    (validated,) = (text for line, text in outputs.items() if line.endswith("x.config --validate"))
    assert validated.strip().endswith("ok")
    (printed,) = (text for line, text in outputs.items() if line.endswith("--print-config"))
    assert "model.embedding_dim" in printed
    (shown,) = (text for line, text in outputs.items() if line.endswith("--dry-run"))
    assert "position  kind" in shown and not (home / "runs/x").exists()
