"""Prediction by several processes that are killed: the folder equals that of one undisturbed process."""

import json
import random
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from recsys import files
from tests.integration.runs import command
from tests.tools.forks import Fork, run_command, server

BAD_ROWS = {5: "uih_item_id", 17: "uih_timestamps", 38: "uih_item_id"}
GROUP = 4
"""Rows of a row group."""


@pytest.fixture(scope="module")
def job(ranker, tmp_path_factory):
    """Flags of a prediction with bad rows in many row groups, and the files of an undisturbed one."""
    base = tmp_path_factory.mktemp("job")
    rows = pq.read_table(ranker.rows).slice(0, 48).to_pylist()
    for row, column in BAD_ROWS.items():
        rows[row][column] = [*rows[row][column], 7]
    for number in range(2):
        part = pa.Table.from_pylist(rows[24 * number : 24 * number + 24], pq.read_schema(ranker.rows))
        pq.write_table(part, base / f"{number}.parquet", row_group_size=GROUP)
    inputs = (base / "0.parquet", base / "1.parquet")
    flags = ["--package", ranker.package, "--input", *inputs, "--set", "data.bad_rows={policy: SKIP}"]
    command("predict", *flags, "--output", base / "whole")
    return [str(flag) for flag in flags], base / "whole"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_rank(rank: int, ranks: int, store: str, *flags: str) -> int:
    """One process of a prediction, as torchrun would start it."""
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    return run_command("predict", *flags)


def start(ranks: int, store: Path, flags: list[str], cwd: Path) -> list[Fork]:
    target = f"{__name__}:run_rank"
    variables = [{"RANK": str(rank)} for rank in range(ranks)]
    return [
        server().start(target, rank, ranks, str(store), *flags, cwd=cwd, **variables[rank])
        for rank in range(ranks)
    ]


def predict_with_kills(job: tuple[list[str], Path], folder: Path, kills: int) -> None:
    """Starts the prediction again and again, with one to three processes, and kills all of them each time."""
    flags, whole = job
    out, chance = folder / "out", random.Random(0)
    flags = [*flags, "--output", str(out)]
    killed = 0
    for attempt in range(10 * kills):
        before = len(list(out.glob("part-*")))
        processes = start(chance.choice((2, 1, 2, 3)), folder / f"store-{attempt}", flags, folder)
        # Wait for the first new part, which comes after the package has been loaded, or for the end of all.
        while len(list(out.glob("part-*"))) == before and any(p.poll() is None for p in processes):
            time.sleep(0.001)
        time.sleep(chance.random() * 0.1)
        running = [process for process in processes if process.poll() is None]
        victim = chance.choice(running) if running else None
        for process in [victim, *running] if victim else []:
            process.kill()
        outputs = [process.communicate()[0] for process in processes]
        # A process may see that the connection to the victim broke before it is killed itself.
        assert victim or all(process.returncode == 0 for process in processes), "\n".join(outputs)
        killed += victim is not None
        if killed == kills:
            break
        if victim is None:
            for part in chance.sample(sorted(out.glob("part-*")), 8):
                part.unlink()
    assert killed == kills
    ranks = 2
    processes = start(ranks, folder / "store-last", flags, folder)
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    actual, expected = content(out), content(whole)
    assert {name for name in actual if not name.endswith(".partial")} == set(expected)
    assert {name: actual[name] for name in expected} == expected


def test_killed_processes_leave_what_others_finish(job, tmp_path):
    predict_with_kills(job, tmp_path, kills=1)


@pytest.mark.slow
def test_twenty_kills_leave_what_others_finish(job, tmp_path):
    predict_with_kills(job, tmp_path, kills=20)


def test_manifest_and_lists_of_bad_rows_say_what_is_where(job, ranker):
    flags, whole = job
    manifest = json.loads((whole / "_manifest.json").read_text())
    assert (manifest["rows"], manifest["left_out"]) == (48, len(BAD_ROWS))
    assert [(Path(part["input"]).name, part["first_row"]) for part in manifest["parts"]] == [
        (f"{file}.parquet", first) for file in range(2) for first in range(0, 24, GROUP)
    ]
    for part in manifest["parts"]:
        path = whole / part["part"]
        assert (part["bytes"], part["sha256"]) == (path.stat().st_size, files.sha256(path))
    listed = [
        json.loads(line)
        for path in sorted((whole / "_bad_rows").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert [24 * int(Path(bad["file"]).stem) + bad["row"] for bad in listed] == list(BAD_ROWS)
    for bad, column in zip(listed, BAD_ROWS.values(), strict=True):
        assert bad["kind"] == "ragged" and column in bad["reason"]
    # Every row has its answer, in the order of the input, whichever part holds it.
    actual, rows = pq.read_table(whole), pq.read_table(ranker.rows).slice(0, 48)
    assert actual["request_id"].to_pylist() == rows["request_id"].to_pylist()
    empty = [number for number, scores in enumerate(actual["is_click"].to_pylist()) if scores is None]
    assert empty == list(BAD_ROWS)


def test_too_many_bad_rows_end_a_prediction(job, tmp_path):
    flags, _ = job
    said = command(
        "predict", *flags[:-1], "data.bad_rows={policy: SKIP limit: 2}", "--output", tmp_path, code=3
    )
    assert "3 bad rows were left out, more than data.bad_rows.limit = 2" in said
    assert not (tmp_path / "_SUCCESS").exists()
