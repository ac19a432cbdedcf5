"""A ranker and a retriever, trained for a moment and exported: made once for all files that ask for them.

The ranker is what scripts/quickstart makes of a shorter training of a smaller model.
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recsys.inference import exporter, trial
from tests.integration.runs import ROOT, command, one_thread

QUICKSTART_OUTPUT = "quickstart.txt"
"""The file beside the ranker's run that holds what scripts/quickstart printed."""

RARE = ("follow", "comment", "forward", "hate")
"""Kinds of actions that the shorter quickstart leaves out."""

LIKE_OTHERS = (
    ("author_id", "[HISTORY, CANDIDATE]"),
    ("follow_user_num_range", "[USER]"),
    ("register_days_range", "[USER]"),
)
"""Features that are left out, with their sides: the others have all kinds of features among them."""

SHORT = {
    "num_epochs: 2": "num_steps: 40",
    "warmup_steps: 50": "warmup_steps: 10",
    "num_workers: 1": "num_workers: 0",
    # The compiler takes time for each layer, each kind of action and each feature.
    "num_layers: 2": "num_layers: 1",
    **{f'          bits {{ name: "is_{name}" bit: {bit} }}\n': "" for bit, name in enumerate(RARE, start=2)},
    **{
        f'features {{ name: "{name}" sides: {sides} id {{ vocabulary {{}} }} }}\n': ""
        for name, sides in LIKE_OTHERS
    },
}
"""Changes of the text of configs/quickstart.config."""

STAND_IN = """#!/bin/sh
case "$2" in
    recsys.train | recsys.evaluate | recsys.predict) printf '%s\\n' "$@" >requests; cat answers ;;
    *) exec {python} "$@" ;;
esac
"""
"""The Python that scripts/quickstart calls: it sends most commands to this process, which has imported
what they need. The export runs in a new process, since what libraries print about themselves shows there."""

RETRIEVER = (
    "configs/movielens_small_two_tower.config",
    "train.num_epochs=",
    "train.num_steps=12",
    "train.schedule.warmup_steps=0",
    'train.evaluation={every_steps: 12 max_batches: 1 best_metric: "ndcg@10"}',
    "data.num_workers=0",
    "data.batch_size=8",
    # A second layer would take a third of the compiler's time.
    "model.retriever.mixer.hstu.num_layers=1",
    # The items are a file of the package, and genres and years are compiled.
    "export.tables.memory_map_above_bytes=1000000",
)


class Exported(NamedTuple):
    """A trained run, its package alone in a folder, and the rows that it is tried on."""

    run: Path
    package: Path
    rows: Path


def shared(base: Path, name: str) -> Exported:
    """Returns the run and the package of `name`; the first process of a test run that asks makes them.

    Args:
        base: temporary folder of the whole test run, which workers of pytest-xdist share.
        name: "ranker" or "retriever".
    """
    folder = base / f"exported-{name}"
    folder.mkdir(exist_ok=True)
    made = Exported(folder / "run", folder / "alone" / "export", folder / "rows.parquet")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.package.exists():
            shutil.rmtree(made.run, ignore_errors=True)
            _make_ranker(made) if name == "ranker" else _make(made, *RETRIEVER)
            made.package.parent.mkdir(exist_ok=True)
            shutil.move(made.run / "export", made.package)
    return made


def _make_ranker(made: Exported) -> None:
    """Runs scripts/quickstart in a folder that is like a checkout."""
    shutil.copyfile(ROOT / "tests/data/kuairand/test.parquet", made.rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for name in ("recsys", "tests"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("configs", "scripts"):
            (folder / name).mkdir()
        config = (ROOT / "configs" / "quickstart.config").read_text(encoding="utf-8")
        for text, short in SHORT.items():
            assert text in config
            config = config.replace(text, short)
        (folder / "configs" / "quickstart.config").write_text(config, encoding="utf-8")
        script = shutil.copy(ROOT / "scripts" / "quickstart", folder / "scripts")
        (folder / "scripts" / "_bootstrap.sh").write_text("bootstrap() { :; }\n")
        stand_in = folder / ".venv" / "bin" / "python"
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(STAND_IN.format(python=shlex.quote(sys.executable)))
        stand_in.chmod(0o755)
        os.mkfifo(folder / "requests")
        os.mkfifo(folder / "answers")
        said = _run_quickstart(script, folder, made.run.parent / QUICKSTART_OUTPUT)
        # Nothing but our own lines: a user cannot act on what libraries say about themselves.
        steps = said.split("+ python -m recsys.")
        (exporting,) = (step.strip().splitlines()[1:] for step in steps if step.startswith("export"))
        assert exporting and all(" INFO " in line for line in exporting), said
        shutil.move(folder / "runs" / "quickstart", made.run)


def _run_quickstart(script: str, folder: Path, output: Path) -> str:
    """Runs the script, and the commands that its Python sends here; returns what it printed."""
    with output.open("w", encoding="utf-8") as file:
        # An empty request says that the script has ended.
        quickstart = subprocess.Popen(
            ["bash", "-c", 'bash "$0"; code=$?; : >requests; exit $code', script],
            cwd=folder,
            env=one_thread() | {"PYTHONPATH": str(folder)},
            stdout=file,
            stderr=file,
        )
        try:
            while request := (folder / "requests").read_text().splitlines():
                _, module, *arguments = request
                answer = command(module.removeprefix("recsys."), *arguments, cwd=folder)
                (folder / "answers").write_text(answer, encoding="utf-8")
            code = quickstart.wait()
        finally:
            quickstart.kill()
    said = output.read_text(encoding="utf-8")
    assert code == 0, said
    return said


def _make(made: Exported, config: str, *overrides: str) -> None:
    table = pq.read_table(ROOT / "tests/data/movielens/test.parquet")
    few = table.filter(pc.less_equal(pc.list_value_length(table["uih_item_id"]), 50))
    pq.write_table(few, made.rows, row_group_size=100)
    settings = [part for override in overrides for part in ("--set", override)]
    command("train", "--config", config, "--run-dir", made.run, *settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "Trial", TrialHere)
        command("export", "--run-dir", made.run, cwd=ROOT)


class TrialHere(nullcontext):
    """Compares a new package with its model as the exporter's new process does, without its seconds of
    imports; the export of the ranker starts that process."""

    def __init__(self, folder: Path, modules: list[str]):
        super().__init__(self)
        self._folder = folder

    def run(self) -> subprocess.CompletedProcess[str]:
        differences = list(trial.differences(self._folder))
        return subprocess.CompletedProcess([], 0, json.dumps(differences), "")
