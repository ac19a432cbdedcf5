"""Training and evaluation from Python against the commands with the same config, rows and seed."""

import gc
import logging
import os
import random
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

import recsys
from recsys import train as train_command
from recsys.data import loader
from recsys.errors import ConfigError, DataError, NonFiniteLossError, RecsysError
from recsys.training.signals import catching_signals
from tests.integration import runs

DATA = "tests/data/kuairand"
CONSTANT = "train.schedule={constant {}}"
"""A schedule that does not depend on the end of the run."""


@pytest.fixture(scope="module")
def train():
    return pq.read_table(f"{DATA}/train.parquet").slice(0, 2048)


@pytest.fixture(scope="module")
def validation():
    return pq.read_table(f"{DATA}/validation.parquet").slice(0, 256)


def config(*overrides):
    """The config of `tests.integration.runs`."""
    return recsys.config(runs.CONFIG, [CONSTANT, *overrides])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def files(tmp_path_factory, train, validation):
    """Overrides that name files with the rows in row groups of the size that tables in memory have."""
    folder = tmp_path_factory.mktemp("rows")
    for name, table in (("train", train), ("validation", validation)):
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=1024)
    return [f"data.{name}.parquet.paths='{folder}/{name}.parquet'" for name in ("train", "validation")]


@pytest.fixture(scope="module")
def trained_by_command(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("command") / "run"
    assert runs.train(folder, CONSTANT, "train.num_steps=8", *files) == 0
    return folder


@pytest.fixture(scope="module")
def fitted(train, validation):
    torch.manual_seed(0)
    model = recsys.build(config())
    result = recsys.fit(model, train, validation=validation, steps=8, progress=False)
    return model, result


@pytest.mark.parametrize("place", ["files", "memory"])
def test_rows_are_read_by_other_processes_into_the_same_weights(
    files, train, validation, fitted, monkeypatch, place
):
    pools, pool_of = [], loader.ReaderPool
    monkeypatch.setattr(
        loader, "ReaderPool", lambda *given, **named: pools.append(1) or pool_of(*given, **named)
    )
    torch.manual_seed(0)
    model = recsys.build(config(*(files if place == "files" else ()), "data.num_workers=2"))
    rows = {} if place == "files" else {"train": train, "validation": validation}
    recsys.fit(model, **rows, steps=8, progress=False)
    assert len(pools) == 2  # for training, and for all evaluations
    assert same(model.module.state_dict(), fitted[0].module.state_dict())
    if place == "files":
        assert recsys.evaluate(model, "validation") == recsys.evaluate(model, validation)
        assert len(pools) == 3


def test_weights_and_metrics_are_those_of_the_command(trained_by_command, fitted):
    model, result = fitted
    # The run folder holds what the command trained; its records are compared bit for bit.
    command = recsys.load(trained_by_command)
    assert same(model.module.state_dict(), command.module.state_dict())
    records = runs.records(trained_by_command, "evaluation")
    assert result.evaluations["step"].to_pylist() == list(records) == [6, 8]
    for name in ("is_click/auc", "watch_time/mae", "loss"):
        assert result.evaluations[name].to_pylist() == [r["metrics"][name] for r in records.values()]
    best = max(records.values(), key=lambda record: record["metrics"]["is_click/auc"])
    assert (result.best_step, result.metrics) == (best["step"], best["metrics"])
    losses = [record["loss"] for record in runs.records(trained_by_command).values()]
    assert result.history["loss"].to_pylist() == losses


def test_evaluation_gives_the_numbers_of_the_command(trained_by_command, fitted, validation, capsys):
    model, _ = fitted
    assert runs.evaluate("--run-dir", str(trained_by_command), "--split", "validation") == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    metrics = recsys.evaluate(model, validation)
    assert {name: f"{value:.5f}" for name, value in metrics.items()} == printed


def test_a_fitted_folder_is_a_run_that_the_commands_go_on_with(
    tmp_path, train, validation, trained_by_command
):
    folder = tmp_path / "run"
    model = recsys.build(config())
    first = recsys.fit(model, train, validation=validation, steps=4, folder=folder, progress=False)
    assert (first.step, first.folder) == (4, folder)
    # From here on only the folder is left: the rows are in it, the vocabularies where the config says.
    del model
    gc.collect()
    flags = ["--run-dir", str(folder), "--set", "train.num_steps=8"]
    assert train_command.main(flags) == 0
    newest = recsys.load(folder, "newest").module.state_dict()
    assert same(newest, recsys.load(trained_by_command, "newest").module.state_dict())
    # Python goes on with it as well, and refuses other rows.
    model = recsys.build(config())
    again = recsys.fit(model, train, validation=validation, steps=8, folder=folder, progress=False)
    assert (again.step, again.reason) == (8, "all 8 steps are done")
    assert same(model.module.state_dict(), recsys.load(folder).module.state_dict())
    with pytest.raises(RecsysError, match="holds a run on other rows"):
        recsys.fit(model, train.slice(5), validation=validation, steps=9, folder=folder, progress=False)


def test_a_second_fit_begins_with_the_weights_of_the_first(fitted, train):
    model = recsys.build(config())
    start = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    model.module.load_state_dict(fitted[0].module.state_dict())
    # Steps with a rate of 1e-30 move nothing in float32, so what is left is what training began with.
    model.config = config(
        "train.dense_optimizer.adamw.lr=1e-30", "train.sparse_optimizer.row_wise_adagrad.lr=1e-30"
    )
    recsys.fit(model, train, steps=1, progress=False)
    ended = model.module.state_dict()
    assert same(ended, fitted[0].module.state_dict())
    assert not same(ended, start)


def test_building_and_training_leave_no_trace(train, capsys):
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    expected = random.Random(7).random(), np.random.RandomState(7).rand(), torch.rand(1)
    torch.manual_seed(7)
    show_error, level = sys.excepthook, logging.getLogger("recsys").level
    text = Path(runs.CONFIG).read_text(encoding="utf-8")
    cfg = recsys.config(re.sub(r"(train|validation) { parquet.*", "", text), [CONSTANT])
    rows = recsys.batches(train.slice(0, 64), cfg)
    model = recsys.build(cfg)
    result = recsys.fit(model, rows, steps=2)
    assert "2/2" in capsys.readouterr().out
    assert result.metrics == {} and result.evaluations.num_rows == 0
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert not dist.is_initialized()
    assert sys.excepthook is show_error
    assert logging.getLogger("recsys").level == level
    (address,) = rows.source.parquet.paths
    memory = fsspec.filesystem("memory")
    assert memory.exists(address)
    del rows
    gc.collect()
    assert not memory.exists(address)


def test_a_process_group_of_the_callers_is_used_and_left_alone(train, fitted, validation):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = recsys.build(config())
        recsys.fit(model, train, validation=validation, steps=8, progress=False)
        assert dist.is_initialized()
        assert same(model.module.state_dict(), fitted[0].module.state_dict())
    finally:
        dist.destroy_process_group()


def test_hooks_hear_of_a_run_in_order(train, validation):
    class Heard(recsys.Hook):
        def __init__(self):
            self.events = []

        def started(self, run):
            self.events.append(("started", run.total_steps))

        def stepped(self, step):
            self.events.append(("stepped", step))

        def evaluated(self, record):
            self.events.append(("evaluated", record.step))

        def finished(self, outcome):
            self.events.append(("finished", outcome.step))

        def close(self):
            self.events.append(("closed", 0))

    hook = Heard()
    cfg = config("train.evaluation.every_steps=2")
    rows = recsys.batches(train, cfg)
    recsys.fit(recsys.build(cfg), rows, validation=validation, steps=2, callbacks=[hook], progress=False)
    assert hook.events == [
        ("started", 2), ("stepped", 1), ("stepped", 2), ("evaluated", 2), ("finished", 2), ("closed", 0),
    ]  # fmt: skip


def test_an_interrupt_stops_after_the_step_and_keeps_what_was_learned(train):
    class Interrupts(recsys.Hook):
        def stepped(self, step):
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    stopped, whole = recsys.build(config()), recsys.build(config())
    result = recsys.fit(stopped, train, steps=8, callbacks=[Interrupts()], progress=False)
    assert (result.step, result.reason) == (3, f"signal {signal.SIGINT:d} stopped the run")
    recsys.fit(whole, train, steps=3, progress=False)
    assert same(stopped.module.state_dict(), whole.module.state_dict())


def test_signals_are_caught_in_the_main_thread_only():
    def entered():
        with catching_signals({}):
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(entered).result() is signal.getsignal(signal.SIGINT)


def test_polars_frames_train_like_the_tables_they_hold(train, fitted, validation):
    model = recsys.build(config())
    frames = [pl.DataFrame(pl.from_arrow(table)) for table in (train, validation)]
    recsys.fit(model, frames[0], validation=frames[1], steps=8, progress=False)
    assert same(model.module.state_dict(), fitted[0].module.state_dict())


def test_rows_of_the_config_are_used_where_none_are_given(fitted, files):
    model = recsys.build(config(*files))
    recsys.fit(model, steps=8, progress=False)
    assert same(model.module.state_dict(), fitted[0].module.state_dict())


def with_value(table, name, row, value):
    values = table[name].to_pylist()
    values[row] = value
    place = table.schema.get_field_index(name)
    return table.set_column(place, name, pa.array(values, table[name].type))


def test_mistakes_name_what_is_wrong_and_change_nothing(train, validation, fitted):
    model, _ = fitted
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    first_rows = train.slice(0, 64)
    unlabelled = first_rows.drop_columns(["candidate_is_click"])
    ragged = with_value(first_rows, "uih_item_id", 5, [1] * 1000)
    nan = config("train.dense_optimizer.adamw.lr=1e30")
    cases = [
        (lambda: recsys.fit(model, unlabelled, progress=False), DataError, "no column candidate_is_click"),
        (lambda: recsys.evaluate(model, unlabelled), DataError, "no column candidate_is_click"),
        (
            lambda: recsys.fit(model, ragged, steps=4, progress=False),
            DataError,
            "^train.parquet, row 5: .*uih_item_id",
        ),
        (lambda: recsys.fit(model, first_rows.slice(0, 0)), DataError, "there are no rows"),
        (lambda: recsys.fit(model, first_rows, steps=1, epochs=1), ConfigError, "give one of them"),
        (lambda: recsys.fit(model, first_rows, steps=0), ConfigError, "train.num_steps"),
        (lambda: recsys.fit(model, first_rows, callbacks=[print]), ConfigError, "extend recsys.Hook"),
        (lambda: recsys.fit(model, 3), DataError, "rows: int is given"),
        (lambda: recsys.fit(model, "nowhere.parquet"), DataError, "nowhere.parquet: no such file"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    assert same(model.module.state_dict(), before)
    diverging = recsys.build(nan)
    start = {name: tensor.clone() for name, tensor in diverging.module.state_dict().items()}
    with pytest.raises(NonFiniteLossError):
        recsys.fit(diverging, train, steps=16, progress=False)
    assert same(diverging.module.state_dict(), start)
