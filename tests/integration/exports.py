"""A ranker and a retriever, trained for a moment and exported: made once for all files that ask for them."""

import fcntl
import shutil
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.integration.runs import ROOT, command, command_in_new_process

RANKER = ("tests/integration/tiny.config", "train.num_steps=40", "train.evaluation.every_steps=40")
RETRIEVER = (
    "configs/movielens_small_two_tower.config",
    "train.num_epochs=",
    "train.num_steps=12",
    "train.schedule.warmup_steps=0",
    "train.evaluation.every_steps=12",
    "data.num_workers=0",
    # A second layer would take a third of the compiler's time; the package of the quickstart has two.
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
            _make(made, *(RANKER if name == "ranker" else RETRIEVER))
    return made


def _make(made: Exported, config: str, *overrides: str) -> None:
    if config == RANKER[0]:
        shutil.copyfile(ROOT / "tests/data/kuairand/test.parquet", made.rows)
    else:
        table = pq.read_table(ROOT / "tests/data/movielens/test.parquet")
        short = table.filter(pc.less_equal(pc.list_value_length(table["uih_item_id"]), 50))
        pq.write_table(short, made.rows, row_group_size=100)
    settings = [part for override in overrides for part in ("--set", override)]
    command("train", "--config", config, "--run-dir", made.run, *settings)
    # Nothing but our own lines: a user cannot act on what libraries say about themselves.
    said = command_in_new_process("export", "--run-dir", made.run, cwd=ROOT).strip().splitlines()
    assert all(" INFO " in line for line in said), said
    made.package.parent.mkdir(exist_ok=True)
    shutil.move(made.run / "export", made.package)
