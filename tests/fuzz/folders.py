"""Folders to damage, and the commands that read them.

`make` fills a folder with prepared data, a trained run, a sweep and, on request, an exported package with its
predictions; all paths in it are relative, so that a copy works in any place.
"""

import importlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

import recsys
from recsys.errors import RecsysError

ROOT = Path(__file__).resolve().parents[2]
KUAIRAND = ROOT / "tests/data/kuairand"

_DATA = """
data {
  train { parquet { paths: "data/train.parquet" } }
  validation { parquet { paths: "data/validation.parquet" } }
  test { parquet { paths: "data/test.parquet" } }
  vocabulary_dir: "data/vocabulary"
  batch_size: 16
  num_workers: 0
  max_history_len: 20
  %s
}
"""

_TRAIN = """
train {
  num_steps: 4
  evaluation { every_steps: 2 max_batches: 2 }
  checkpoint { every_steps: 2 }
  log_every_steps: 1
}
export { parity_rows: 20 cached_scoring: %s }
"""

RANKER = (
    _DATA % 'max_candidates: 5 key_columns: "user_id" key_columns: "request_id"'
    + """
features { name: "item_id" sides: [HISTORY, CANDIDATE] id { vocabulary {} } }
features { name: "tag" sides: [HISTORY, CANDIDATE] id { vocabulary {} multi_valued: true pooling: MEAN } }
features { name: "hour" sides: [USER] id { vocabulary {} embedding_dim: 4 } }
model {
  embedding_dim: 8
  ranker {
    preprocessor { contextual { content { hidden: 8 } positional { num_time_buckets: 8 } } }
    mixer { hstu { num_layers: 1 num_heads: 1 qk_dim: 8 } }
    head { fusion { mlp { hidden: 8 } } }
    tasks { name: "is_click" loss { binary_cross_entropy {} } metrics { auc {} } }
  }
}
"""
    + _TRAIN % "true"
)

RETRIEVER = (
    _DATA % 'key_columns: "user_id" item_file: "data/items.parquet"'
    + """
features { name: "item_id" sides: [HISTORY, CANDIDATE] id { vocabulary {} } }
features { name: "author_id" sides: [ITEM] id { vocabulary {} embedding_dim: 4 } }
model {
  embedding_dim: 8
  embedding { placement: REPLICATED }
  retriever {
    item_feature: "item_id"
    item_encoder { mlp { hidden: 8 } residual: true }
    preprocessor { uih { positional {} } }
    mixer { hstu { num_layers: 1 num_heads: 1 qk_dim: 8 } }
    loss { softmax { in_batch { num_uniform: 8 } } }
    metrics { ndcg { k: 10 } }
  }
}
"""
    + _TRAIN % "false"
)
CONFIGS = {"ranker": RANKER, "retriever": RETRIEVER}


def make(folder: Path, kind: str, *, packages: bool) -> None:
    """Fills a new folder; `packages` takes half a minute, since packages are compiled."""
    folder.mkdir(parents=True)
    (_ranking_data if kind == "ranker" else _retrieval_data)(folder / "data")
    (folder / "model.config").write_text(CONFIGS[kind])
    here = Path.cwd()
    os.chdir(folder)
    try:
        _run("train", "--config", "model.config", "--run-dir", "run")
        _run("evaluate", "--run-dir", "run")
        if packages:
            _run("sweep", "--config", "model.config", "--run-dir", "sweep", "--vary", "train.num_steps=[2,4]")
            _run("export", "--run-dir", "run", "--output", "export")
            _run("predict", "--package", "export", "--output", "predictions")
    finally:
        os.chdir(here)


def copy(original: Path, root: Path) -> None:
    """Copies a folder of `make`; predictions name their input by its whole path."""
    shutil.copytree(original, root, dirs_exist_ok=True)
    job = root / "predictions/_job.json"
    if job.exists():
        entries = json.loads(job.read_text())
        for mark in entries["input"]:
            mark["path"] = str(root / "data" / Path(mark["path"]).name)
        job.write_text(json.dumps(entries, indent=1) + "\n")


def _run(command: str, *arguments: str) -> None:
    code = importlib.import_module(f"recsys.{command}").main(arguments)
    assert code == 0, f"{command} ended with {code}"


def _ranking_data(folder: Path) -> None:
    shutil.copytree(
        KUAIRAND, folder, ignore=lambda _, names: {"original", "LICENSE", "SOURCE.md"} & set(names)
    )
    for split in ("train", "validation", "test"):
        table = pq.read_table(folder / f"{split}.parquet")
        pq.write_table(table.slice(0, 80), folder / f"{split}.parquet", row_group_size=40)
    for path in (folder / "vocabulary").iterdir():
        if path.stem not in ("item_id", "tag", "hour"):
            path.unlink()


def _retrieval_data(folder: Path) -> None:
    events = (ROOT / "recsys/sample/events.csv").read_text().splitlines()[:3000]
    folder.parent.mkdir(exist_ok=True)
    log = folder.with_name("events.csv")
    log.write_text("\n".join(events) + "\n")
    columns = ("--user-column", "user_id", "--item-column", "video_id", "--time-column", "time")
    arguments = ("--task", "retrieval", "--item-feature", "author_id", "--output", str(folder))
    code = importlib.import_module("recsys.prepare.__main__").main(
        ["csv", "--input", str(log), *columns, *arguments]
    )
    assert code == 0
    log.unlink()
    for split in ("train", "validation", "test"):
        (folder / split / "part-00000.parquet").rename(folder / f"{split}.parquet")


class Scenario(NamedTuple):
    """A command and the parts of the folder that it reads.

    Attributes:
        action: runs it in the folder and returns its exit code.
        needs_package: only with the folders that `make` compiles.
    """

    name: str
    parts: list[str]
    action: Callable[[], int]
    kinds: tuple[str, ...] = ("ranker", "retriever")
    needs_package: bool = False


def _command(name: str, *arguments: str) -> Callable[[], int]:
    def call() -> int:
        return importlib.import_module(f"recsys.{name}").main(arguments)

    return call


def _loaded(folder: str) -> Callable[[], int]:
    """Loads a model from Python and asks it for scores; an error for users counts as an exit code."""

    def call() -> int:
        rows = pq.read_table("data/test.parquet").slice(0, 10)
        try:
            model = recsys.load(folder)
            model.score(rows)
            model.recommend(rows, k=3)
        except RecsysError as error:
            print(error)
            return error.exit_code
        except OSError as error:
            # Python's own errors about a file name it too, and the commands show them.
            print(error)
            return RecsysError.exit_code
        return 0

    return call


RUN, DATA = ["run"], ["data"]
NEW = [*DATA, "model.config"]
CONFIG = ("--config", "model.config")
LONGER = ("--run-dir", "run", "--set", "train.num_steps=5")
SHORT = ("--run-dir", "new", "--set", "train.num_steps=2")
SWEEP = (*CONFIG, "--run-dir", "sweep", "--vary", "train.num_steps=[2,4]")
BLEND = ("--run-dir", "run", "--output", "blended")
PREDICT = ("--package", "export", "--output")
SCENARIOS = [
    Scenario("resume", RUN, _command("train", *LONGER)),
    Scenario("resume, other data", DATA, _command("train", *LONGER)),
    Scenario("train", NEW, _command("train", *CONFIG, *SHORT)),
    Scenario("dry run", NEW, _command("train", *CONFIG, "--dry-run")),
    Scenario("finished", RUN, _command("train", "--run-dir", "run")),
    Scenario("evaluate", [*RUN, *RUN, *DATA], _command("evaluate", "--run-dir", "run")),
    Scenario("export", [*RUN, *DATA], _command("export", "--run-dir", "run", "--dry-run")),
    Scenario("validate", NEW, _command("train", *CONFIG, "--validate")),
    Scenario("print", RUN, _command("train", "--run-dir", "run", "--print-config")),
    Scenario("baseline", [*DATA, "run/config.resolved"], _command("baseline", "--run-dir", "run")),
    Scenario("blend", [*RUN, *DATA], _command("blend", *BLEND), kinds=("retriever",)),
    Scenario("load", RUN, _loaded("run")),
    Scenario("sweep", ["sweep"], _command("sweep", *SWEEP), needs_package=True),
    Scenario(
        "predict",
        [*3 * ["export"], "data/test.parquet"],
        _command("predict", *PREDICT, "out"),
        needs_package=True,
    ),
    Scenario(
        "predict again", ["predictions"], _command("predict", *PREDICT, "predictions"), needs_package=True
    ),
    Scenario("load package", ["export"], _loaded("export"), needs_package=True),
]


def scenarios(kind: str, *, packages: bool) -> list[Scenario]:
    """The scenarios of a folder."""
    return [x for x in SCENARIOS if kind in x.kinds and (packages or not x.needs_package)]


def choose(generator: random.Random, kind: str, *, packages: bool, only: str | None = None) -> Scenario:
    """Draws a scenario."""
    return generator.choice([x for x in scenarios(kind, packages=packages) if only in (None, x.name)])
