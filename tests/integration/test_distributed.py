"""Two processes compute the same as one, resume where one stopped, and stop together."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recsys import files
from recsys.modules import table_values
from recsys.training import checkpoint
from recsys.training.distributed import process_group
from tests.integration import ranks
from tests.integration.runs import evaluate, finish, flags, records, tensors, torchrun, train, wait_for
from tests.tools.forks import Fork, run_ranks, start_command

STILL = (
    "model.ranker.preprocessor.contextual.dropout=0",
    "model.ranker.mixer.hstu.dropout=0",
    "data.num_lanes=1",
    "train.num_steps=8",
    "train.schedule.warmup_steps=2",
    "train.evaluation.every_steps=4",
)
"""Nothing is drawn, and batch k of 16 rows is batches 2k and 2k + 1 of 8 rows."""

BRIEF = (*STILL, "train.num_steps=4", "train.checkpoint.every_steps=4")
"""Enough steps for 40 rows to end and begin anew on two ranks, and an evaluation."""

HALF = ("data.batch_size=8", "data.eval_batch_size=32")
LONGER = ("train.num_steps=12", "train.checkpoint.keep=9")
AVERAGED = ("train.weight_averaging={ema {decay: 0.7}}",)
VARIANTS = {
    "averaged": AVERAGED,
    "averaged_replicated": (
        "model.embedding.placement=REPLICATED",
        "train.weight_averaging={swa {start_step: 2 every_steps: 1}}",
    ),
    "accumulated_column_wise": (
        "train.accumulate_batches=2",
        "train.sharding.kind=COLUMN_WISE",
        "train.sparse_optimizer={adagrad {lr: 0.05}}",
    ),
    "averaged_mixed": (
        "train.weight_averaging={ema {decay: 0.9}}",
        'train.sharding.tables=[{table: "tag" kind: TABLE_WISE}]',
        'model.embedding.tables=[{table: "hour" placement: REPLICATED}]',
    ),
}

RETRIEVER = (
    "data.num_lanes=1",
    "train.num_steps=4",
    "train.evaluation={every_steps: 4 max_batches: 2 best_metric: 'mrr'}",
    "train.dense_optimizer={sgd {lr: 0.02}}",
    "train.sparse_optimizer={sgd {lr: 0.1}}",
    """features=[
      {name: "item_id" sides: [HISTORY, CANDIDATE] id {vocabulary {}}},
      {name: "tag" sides: [HISTORY, CANDIDATE] id {vocabulary {} multi_valued: true}}
    ]""",
    """model={
      embedding_dim: 16
      retriever {
        item_feature: "item_id"
        preprocessor { uih { positional {} } }
        mixer { hstu { num_heads: 2 qk_dim: 8 } }
        loss { softmax { full {} learn_temperature: true } }
        item_encoder { mlp { hidden: 16 } }
        metrics { mrr {} }
      }
    }""",
)
"""A full softmax over a sharded catalogue, which two ranks divide, with everything that has gradients."""

OVER_ROWS = (
    "model.ranker.head={ple {num_levels: 2 expert_dim: 8}}",
    "model.ranker.tasks[0].loss={jrc {}}",
    "model.ranker.tasks[1].loss={pairwise {mean_squared_error {log1p: true}}}",
    "model.ranker.tasks[0].weight_column=candidate_watch_time",
    "model.ranker.tasks[1].given_task=is_click",
)
"""Losses that compare the candidates of a row; weights from a column; a task that counts some candidates."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def uneven(folder) -> tuple[str, str]:
    """40 rows, 5 batches of 8: two ranks need a filler in each epoch."""
    path = folder / "rows.parquet"
    pq.write_table(pq.read_table("tests/data/kuairand/train.parquet").slice(0, 40), path, row_group_size=40)
    return (f'data.train.parquet.paths=["{path}"]', f'data.validation.parquet.paths=["{path}"]')


@pytest.fixture(scope="module")
def jobs(folder, uneven) -> dict[str, list[str]]:
    """Overrides of each run by name, for one process."""
    settings = {name: [*BRIEF, *extra] for name, extra in VARIANTS.items()}
    settings["averaged"] = [*STILL, *AVERAGED]
    settings["retriever"] = [*RETRIEVER]
    settings["uneven"] = [*BRIEF, *uneven]
    settings["uneven_rows"] = [*BRIEF, *uneven, *OVER_ROWS]
    settings["uneven_balanced"] = [*STILL, *uneven, "train.balance_ranks=true"]
    return settings


DRAWN_WHOLE = {"averaged_mixed": 1000}
"""By run, the largest table in numbers that each rank builds whole; larger ones are on the meta device."""


@pytest.fixture(scope="module")
def two_ranks(folder, jobs) -> Path:
    """All jobs on two ranks with half the batch, below `two`; and those that only two ranks can do."""
    grown = [*STILL, *AVERAGED, *LONGER]
    train_alone(folder, jobs, "averaged")
    shutil.copytree(folder / "one" / "averaged", folder / "one" / "grown")
    copied = {"averaged": f'train.checkpoint.copy_to="file://{folder}/copies"'}
    often = [*STILL, *HALF, "train.checkpoint.every_steps=6", "train.num_steps=40"]
    often += ["train.evaluation.every_steps=100"]
    warm = [*STILL, *rows_in_another_order(folder)]
    listed = [
        {
            "folder": str(folder / "two" / name),
            "overrides": [*overrides, *HALF, *filter(None, [copied.get(name)])],
            "drawn_whole": DRAWN_WHOLE.get(name, table_values.DRAWN_WHOLE),
        }
        for name, overrides in jobs.items()
    ]
    listed += [
        {
            "folder": str(folder / "one" / "grown"),
            "overrides": grown,
            "save_to": str(folder / "two" / "copy"),
        },
        {"folder": str(folder / "one" / "grown"), "overrides": grown},
        {"folder": str(folder / "warm"), "overrides": warm, "save_to": str(folder / "two" / "warm")},
        {"folder": str(folder / "two" / "full"), "overrides": often, "full": "step-00000012"},
        {"folder": str(folder / "two" / "nan"), "overrides": [*STILL, *HALF], "nan": [1, 3]},
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps(listed))
    run_ranks(ranks.main, str(path), str(folder / "store"))
    shutil.copytree(folder / "two" / "averaged", folder / "two" / "shrunk")
    return folder / "two"


def train_alone(folder: Path, jobs: dict[str, list[str]], name: str) -> None:
    """Runs a job in this process, once."""
    if not (folder / "one" / name).exists():
        assert train(folder / "one" / name, *jobs[name]) == 0


def rows_in_another_order(folder: Path) -> list[str]:
    """Overrides of a run that begins with states of one with another vocabulary, and with vectors of tags."""
    torch.manual_seed(1)
    path = folder / "items.parquet"
    ids = pq.read_table("tests/data/kuairand/vocabulary/item_id.parquet", columns=["id"])
    pq.write_table(ids.take(list(range(7, ids.num_rows))[::-1]), path)
    tags = pq.read_table("tests/data/kuairand/vocabulary/tag.parquet", columns=["id"]).slice(3)
    vectors = pa.array(torch.randn(len(tags), 16).tolist(), pa.list_(pa.float32()))
    pq.write_table(tags.append_column("vector", vectors), folder / "tags.parquet")
    earlier = f'path: "{folder / "one" / "grown"}" checkpoint: "8" optimizer: true exclude: "*.tag_table.*"'
    return [
        f'features[0].id.vocabulary.file="{path}"',
        f'features[1].id.init_from={{parquet: "{folder / "tags.parquet"}"}}',
        f"train.init_from={{{earlier}}}",
    ]


def assert_same_tensors(alone: Path, together: Path) -> None:
    expected, actual = tensors(alone), tensors(together)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("name", [*VARIANTS, "uneven", "uneven_rows", "uneven_balanced"])
def test_losses_and_metrics_are_those_of_one_process(folder, two_ranks, jobs, name, monkeypatch):
    monkeypatch.setattr(table_values, "DRAWN_WHOLE", DRAWN_WHOLE.get(name, table_values.DRAWN_WHOLE))
    train_alone(folder, jobs, name)
    for kind in ("train", "evaluation"):
        expected, actual = records(folder / "one" / name, kind), records(two_ranks / name, kind)
        assert sorted(expected) == sorted(actual) != []
        for step in expected:
            numbers = [
                x["metrics"] if kind == "evaluation" else x["losses"] | {"norm": x["grad_norm"]}
                for x in (expected[step], actual[step])
            ]
            assert numbers[1] == pytest.approx(numbers[0], rel=1e-6, nan_ok=True)


def test_a_divided_catalogue_has_the_losses_of_one_process(folder, two_ranks, jobs):
    """Gradients and uneven batches are compared in `modules/losses/test_divided_softmax.py`."""
    name = "retriever"
    assert train(folder / "one" / name, *jobs[name]) == 0
    for kind, entry in (("train", "losses"), ("evaluation", "metrics")):
        expected, actual = records(folder / "one" / name, kind), records(two_ranks / name, kind)
        assert sorted(expected) == sorted(actual) != []
        for step in expected:
            losses = [{n: x for n, x in r[step][entry].items() if n != "mrr"} for r in (expected, actual)]
            assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_slices_and_bins_are_those_of_one_process(folder, two_ranks, jobs):
    train_alone(folder, jobs, "uneven")
    expected, actual = (
        records(folder / "one" / "uneven", "diagnostics"),
        records(two_ranks / "uneven", "diagnostics"),
    )
    assert sorted(expected) == sorted(actual) != []
    for step in expected:
        for want, got in zip(expected[step]["slices"], actual[step]["slices"], strict=True):
            numbers = [
                {name: -1.0 if value is None else value for name, value in x.pop("metrics").items()}
                for x in (want, got)
            ]
            assert numbers[1] == pytest.approx(numbers[0], rel=1e-6)
            assert got == want
        bins = [x["calibration"]["is_click"] for x in (expected[step], actual[step])]
        assert [entry["candidates"] for entry in bins[1]] == [entry["candidates"] for entry in bins[0]]
        for name in ("predicted", "observed"):
            values = [[entry[name] for entry in entries] for entries in bins]
            assert values[1] == pytest.approx(values[0], rel=1e-6)


def test_a_run_goes_on_with_more_ranks(folder, two_ranks):
    states = folder / "one" / "grown" / "checkpoints"
    assert_same_tensors(states / "step-00000008", two_ranks / "copy" / "step-00000008")
    assert sorted(records(folder / "one" / "grown")) == list(range(1, 13))
    progress = checkpoint.read_state(states / "step-00000012").progress
    assert progress.next_batch == 8 * 1 + 4 * 2


def test_rows_of_two_ranks_are_carried_over_as_in_one_process(folder, two_ranks):
    """A single process carries them over as `test_warm_start` expects it."""
    reports = [json.loads((folder / "warm" / "init_from.json").read_text())]
    pipeline = ranks.config.prepare(ranks.CONFIG, [*STILL, *rows_in_another_order(folder)]).pipeline
    with process_group() as processes:
        session = ranks.open_session(pipeline, folder / "warm", processes)
        session.checkpoints = ranks.Checkpoints(folder / "one" / "warm")
        session.save()
        del session
    reports.append(json.loads((folder / "warm" / "init_from.json").read_text()))
    assert reports[0] == reports[1] and reports[0]["tables"]["item_id"]["carried"] == 608
    tags = tensors(two_ranks / "warm" / "step-00000000")[
        "model.embed.tables.dim_16.embeddings.tag_table.weight"
    ]
    vectors = torch.tensor(pq.read_table(folder / "tags.parquet")["vector"].to_pylist())
    assert sorted(map(tuple, vectors.tolist())) == sorted(
        tuple(x) for x in tags.tolist() if x in vectors.tolist()
    )
    assert_same_tensors(folder / "one" / "warm" / "step-00000000", two_ranks / "warm" / "step-00000000")


def test_a_run_goes_on_with_fewer_ranks(folder, two_ranks):
    run = two_ranks / "shrunk"
    assert files.manifest_faults(folder / "copies" / "step-00000008") == []
    assert_same_tensors(run / "checkpoints" / "step-00000008", folder / "copies" / "step-00000008")
    pipeline = ranks.config.prepare(ranks.CONFIG, [*STILL, *AVERAGED, *HALF, *LONGER]).pipeline
    with process_group() as processes:
        session = ranks.open_session(pipeline, run, processes)
        session.checkpoints = ranks.Checkpoints(folder / "shrunk")
        session.save()
        del session
    assert_same_tensors(run / "checkpoints" / "step-00000008", folder / "shrunk" / "step-00000008")
    assert train(run, *STILL, *AVERAGED, *HALF, *LONGER) == 0
    assert sorted(records(run)) == list(range(1, 13))
    progress = checkpoint.read_state(run / "checkpoints" / "step-00000012").progress
    assert progress.next_batch == 8 * 2 + 4 * 1


def test_all_ranks_stop_at_the_step_in_which_one_loss_is_nan(two_ranks):
    for rank in (0, 1):
        seen = json.loads((two_ranks / "nan" / f"rank-{rank}.json").read_text())
        assert seen["error"] == "NonFiniteLossError"
        assert seen["message"].startswith("step 3: the loss of task is_click is nan")
    assert sorted(records(two_ranks / "nan")) == [1, 2]


def test_all_ranks_stop_when_a_state_cannot_be_written(two_ranks):
    seen = [json.loads((two_ranks / "full" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert seen[0] == seen[1] and seen[0]["message"].startswith("no space left on ")
    assert [path.name for path in (two_ranks / "full" / "checkpoints").iterdir()] == ["step-00000006"]
    assert 12 <= max(records(two_ranks / "full")) < 18, "the next state would be that of step 18"


def start_two_ranks(command: str, *arguments: str) -> list[Fork]:
    """Starts a command with the variables of torchrun, which `test_readme` and a slow test below start."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    return [start_command(command, *arguments, RANK=rank, **shared) for rank in "01"]


def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on(folder, two_ranks, jobs):
    """Ranks exchange rows, as in the run without an interruption that it is compared with."""
    run, whole = folder / "interrupted", two_ranks / "uneven_balanced"
    arguments = flags(run, *jobs["uneven_balanced"], *HALF, "train.rank_timeout=3")
    first, second = start_two_ranks("train", *arguments)
    wait_for(lambda: max(records(run), default=0) >= 2, first)
    os.kill(second.pid, signal.SIGSTOP)
    began = time.monotonic()
    said = finish(first, code=6)
    # Without a heartbeat, gloo would end the wait 33 s later, and the error would name nobody.
    assert 2.5 < time.monotonic() - began < 20
    named = (
        rf"ERROR rank 1 \(pid {second.pid} on \S+\) has not answered for 3 s and was last seen at step \d, "
    )
    assert re.search(named, said) and "Traceback" not in said
    second.kill()
    second.communicate()
    assert max(records(run)) < 8
    for process in start_two_ranks("train", *arguments):
        finish(process)
    for kind in ("train", "evaluation"):
        assert records(run, kind) == records(whole, kind)
    last = Path("checkpoints") / "step-00000008"
    assert_same_tensors(run / last, whole / last)


def test_evaluate_on_two_ranks_finds_what_one_process_finds(two_ranks):
    chosen = ("--run-dir", str(two_ranks / "uneven"), "--split", "validation")
    written = two_ranks / "uneven" / "validation_metrics.json"
    for process in start_two_ranks("evaluate", *chosen):
        finish(process)
    plan = json.loads(written.read_text())
    assert evaluate(*chosen) == 0
    expected = json.loads(written.read_text())
    assert plan.pop("metrics") == pytest.approx(expected.pop("metrics"), rel=1e-6)
    assert plan == expected


@pytest.mark.slow
def test_the_command_under_torchrun_survives_a_death_a_stop_and_a_freeze(tmp_path, monkeypatch):
    """A rank is killed; torchrun gets SIGTERM; rank 0 is stopped, and torchrun starts both again."""
    command = ("-m", "recsys.train")
    said = finish(torchrun(2, *command, *flags(tmp_path / "whole")))
    assert "find_unused_parameters" not in said
    parts = tmp_path / "parts"

    def reach(step: int, *launcher: str) -> tuple[subprocess.Popen[str], list[int]]:
        process = torchrun(2, *launcher, *command, *flags(parts, "train.rank_timeout=5"))
        wait_for(lambda: max(records(parts), default=0) >= step, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return process, [int(pid) for pid in children.split()]

    process, pids = reach(3)
    os.kill(pids[-1], signal.SIGKILL)
    process.communicate(timeout=60)
    process, _ = reach(7)
    process.terminate()
    process.communicate(timeout=60)
    saved = max(path.name for path in (parts / "checkpoints").glob("step-*"))
    assert saved == f"step-{max(records(parts)):08d}"
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1")
    process, pids = reach(10, "--max-restarts=1")
    os.kill(pids[0], signal.SIGSTOP)
    assert f"rank 0 (pid {pids[0]} on " in finish(process)
    assert records(parts) == records(tmp_path / "whole")
    assert records(parts, "evaluation") == records(tmp_path / "whole", "evaluation")
