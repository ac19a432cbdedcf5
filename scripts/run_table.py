#!/usr/bin/env python3
"""Trains the variants of a table with several seeds each, evaluates them, and prints mean and spread.

    python scripts/run_table.py TABLE.json --runs runs/table --record record.json \
        [--seeds 1 2 3] [--variant NAME ...] [--gpus 4] [--parallel 3] [--timing-steps 200]

TABLE.json:

    {"set": ["data.num_workers=1"],                          for every run
     "columns": ["is_click/auc", "is_click/gauc"],           metrics to print
     "split": "test",                                        what is evaluated, "test" if absent; "": what the
                                                             last evaluation in training found is taken
     "goal": {"ndcg@10": 0.1893},                            how long until an evaluation in training is there
     "variants": [{"name": "plain", "config": "configs/x.config", "set": ["PATH=VALUE"]}, ...]}

Each run is `python -m recsys.train` and then `python -m recsys.evaluate` in processes of its own, --parallel
of them at a time on each of --gpus devices; output goes to RUNS/NAME-SEED.log. A run that has ended is not
trained again, one that broke off goes on. The record has each run's evaluations in training with the seconds
since its process began: start-up and compilation count, and what else runs on the device slows it down.
With --timing-steps each variant is trained once more for that many steps, alone on its device, for its step
time and memory; the first third of the steps is not counted.

Exit code 1 when a run failed; the others are in the record all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import recsys.config as config
from recsys import files
from recsys.flags import Parser, positive

ROOT = Path(__file__).resolve().parent.parent
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its folder. variant: whose run it is. seed: `train.seed`; None for a run that is only timed.
        config: file. overrides: values of --set. split: what is evaluated; "" for nothing more.
    """

    name: str
    variant: str
    seed: int | None
    config: str
    overrides: tuple[str, ...]
    split: str


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        variant, seed: of the run. error: what went wrong, or "".
        metrics: of the split. ms: a step, median; memory_mb: at most. Both None where it was not timed.
        seconds: of training, from the start of its process to the end. first_seconds: until the first line of
            metrics.jsonl, so start-up, compilation and the first `train.log_every_steps` steps.
        curve: evaluations in training: `step`, `seconds` since the start, and the metrics of `columns`.
            These three are of a run that began from nothing; empty for one that went on.
    """

    variant: str
    seed: int | None
    error: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    ms: float | None = None
    memory_mb: float | None = None
    seconds: float | None = None
    first_seconds: float | None = None
    curve: list[dict[str, float | None]] = field(default_factory=list)

    def seconds_to(self, goal: dict[str, float]) -> float | None:
        """Seconds until an evaluation had all of `goal`; None if none had."""
        for point in self.curve:
            if all((point.get(name) or -1.0) >= value for name, value in goal.items()):
                return point["seconds"]
        return None


class Follower:
    """Reads a metrics.jsonl while it is written, and notes when each line came."""

    def __init__(self, path: Path):
        self._path = path
        self._place = 0
        self._began = time.monotonic()
        self.first: float | None = None
        self.evaluations: list[tuple[float, dict]] = []

    def look(self) -> None:
        """Reads the lines that have come since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._place)
            new = stream.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._place += len(whole)
        now = round(time.monotonic() - self._began, 1)
        for line in whole.splitlines():
            self.first = now if self.first is None else self.first
            record = json.loads(line)
            if record["kind"] == "evaluation":
                self.evaluations.append((now, record))

    def curve(self, columns: Sequence[str]) -> list[dict[str, float | None]]:
        """Evaluations as `Outcome.curve` has them."""
        return [
            {"step": record["step"], "seconds": seconds}
            | {name: record["metrics"].get(name) for name in columns}
            for seconds, record in self.evaluations
        ]


def runs_of(table: dict, seeds: Sequence[int], chosen: Sequence[str], timing_steps: int) -> tuple[list, list]:
    """Runs for quality and runs for speed.

    Raises:
        ValueError: a variant that is not in the table, or a name that is there twice.
    """
    variants = table["variants"]
    names = [variant["name"] for variant in variants]
    if len(set(names)) < len(names):
        raise ValueError(f"a name occurs twice: {', '.join(names)}")
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"no variant is named {', '.join(unknown)}; there are {', '.join(names)}")
    quality, speed = [], []
    for variant in variants:
        name = variant["name"]
        if chosen and name not in chosen:
            continue
        common = (*table.get("set", []), *variant.get("set", []))
        for seed in seeds:
            overrides = (*common, f"train.seed={seed}")
            split = table.get("split", "test")
            quality.append(Run(f"{name}-{seed}", name, seed, variant["config"], overrides, split))
        if timing_steps:
            every = max(1, timing_steps // 12)
            short = (f"train.num_steps={timing_steps}", "train.num_epochs=", f"train.log_every_steps={every}")
            # One evaluation, at the end, of one batch.
            short += (f"train.evaluation.every_steps={timing_steps}", "train.evaluation.max_batches=1")
            speed.append(Run(f"{name}-timing", name, None, variant["config"], (*common, *short), ""))
    return quality, speed


def carry_out(run: Run, folder: Path, device: int | None, columns: Sequence[str] = ()) -> Outcome:
    """Trains and evaluates in processes of their own."""
    place = folder / run.name
    outcome = Outcome(run.variant, run.seed)
    chosen = [part for override in run.overrides for part in ("--set", override)]
    commands = [["recsys.train", "--config", run.config, "--run-dir", str(place), *chosen]]
    if run.split:
        commands.append(["recsys.evaluate", "--run-dir", str(place), "--split", run.split])
    environment = dict(os.environ)
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    log = folder / f"{run.name}.log"
    follower = None if (place / METRICS).exists() else Follower(place / METRICS)
    with log.open("w", encoding="utf-8") as stream:
        for command in commands:
            began = time.monotonic()
            code = _call([sys.executable, "-m", *command], stream, environment, follower)
            if follower and command is commands[0]:
                outcome.seconds = round(time.monotonic() - began, 1)
                outcome.first_seconds, outcome.curve = follower.first, follower.curve(columns)
            if code:
                outcome.error = f"{command[0]} ended with exit code {code}: see {log}"
                return outcome
    if run.seed is None:
        outcome.ms, outcome.memory_mb = speed_of(place, rows_of_a_step(run))
    elif run.split:
        outcome.metrics = json.loads((place / f"{run.split}_metrics.json").read_text())["metrics"]
    else:
        outcome.metrics = last_evaluation(place)
    return outcome


def _call(
    command: Sequence[str], stream: TextIO, environment: dict[str, str], follower: Follower | None
) -> int:
    """Runs a command to its end, and returns its exit code."""
    process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    try:
        while True:
            try:
                return process.wait(0.1 if follower else None)
            except subprocess.TimeoutExpired:
                follower.look()
    finally:
        if follower:
            follower.look()


def last_evaluation(folder: Path) -> dict[str, float | None]:
    """Metrics of the last evaluation in training."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [line for line in lines if line["kind"] == "evaluation"][-1]["metrics"]


def rows_of_a_step(run: Run) -> int:
    """Rows that one process trains on in a step."""
    pipeline = config.prepare(run.config, list(run.overrides)).pipeline
    return pipeline.data.batch_size * pipeline.train.accumulate_batches


def speed_of(folder: Path, rows: int) -> tuple[float, float]:
    """(ms a step, MB at most) of a run's metrics.jsonl, whose first third is not looked at."""
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    logged = [line for line in lines if line["kind"] == "train"]
    counted = logged[len(logged) // 3 :]
    rates = [line["samples_per_s"] for line in counted]
    return 1000 * rows / statistics.median(rates), max(line["memory_bytes"] for line in counted) / 1e6


def carry_out_all(
    runs: Sequence[Run], gpus: int, parallel: int, work: Callable[[Run, int | None], Outcome]
) -> list[Outcome]:
    """All runs, `parallel` at a time on each device; in the order of `runs`."""
    waiting: queue.SimpleQueue[tuple[int, Run]] = queue.SimpleQueue()
    for number, run in enumerate(runs):
        waiting.put((number, run))
    outcomes: dict[int, Outcome] = {}

    def serve(device: int | None) -> None:
        while True:
            try:
                number, run = waiting.get_nowait()
            except queue.Empty:
                return
            outcomes[number] = work(run, device)
            print(f"{run.name}: {outcomes[number].error or 'done'}", flush=True)

    devices = list(range(gpus)) if gpus else [None]
    threads = [threading.Thread(target=serve, args=(device,)) for _ in range(parallel) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[number] for number in range(len(runs))]


def summary(outcomes: Sequence[Outcome], columns: Sequence[str], goal: dict[str, float] | None = None) -> str:
    """A Markdown table: a line a variant, mean and standard deviation over seeds."""
    more = ["seconds", *([f"seconds to {_named(goal)}"] if goal else []), "ms a step", "MB"]
    lines = [
        "| variant | seeds | " + " | ".join([*columns, *more]) + " |",
        "| --- | --- |" + " --- |" * (len(columns) + len(more)),
    ]
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.variant == variant and not outcome.error]
        seeds = [outcome for outcome in mine if outcome.seed is not None]
        cells = [_mean([outcome.metrics.get(column) for outcome in seeds]) for column in columns]
        cells.append(_mean([outcome.seconds for outcome in seeds], 0))
        if goal:
            cells.append(_mean([outcome.seconds_to(goal) for outcome in seeds], 0))
        timed = next((outcome for outcome in mine if outcome.ms is not None), None)
        cells += ["", ""] if timed is None else [f"{timed.ms:.1f}", f"{timed.memory_mb:.0f}"]
        lines.append(f"| {variant} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(values: Sequence[float | None], digits: int = 4) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return ""
    spread = f" ± {statistics.stdev(there):.{digits}f}" if len(there) > 1 else ""
    return f"{statistics.mean(there):.{digits}f}{spread}"


def _named(goal: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in goal.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--record", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--variant", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--gpus", type=int, default=0, help="devices to spread over; 0: what recsys finds")
    parser.add_argument("--parallel", type=positive, default=1, help="runs at a time on each device")
    parser.add_argument("--timing-steps", type=int, default=0, help="steps of the runs for speed; 0: none")
    options = parser.parse_args(arguments)
    try:
        table = json.loads(options.table.read_text(encoding="utf-8"))
        quality, speed = runs_of(table, options.seeds, options.variant, options.timing_steps)
    except OSError as error:
        sys.stderr.write(f"error: {options.table}: {error.strerror}\n")
        return 2
    except KeyError as error:
        sys.stderr.write(f"error: {options.table}: {error} is missing; --help shows what a table has\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"error: {options.table}: {error}\n")
        return 2
    options.runs.mkdir(parents=True, exist_ok=True)
    columns = table.get("columns", [])
    began = time.monotonic()

    def work(run: Run, device: int | None) -> Outcome:
        return carry_out(run, options.runs.resolve(), device, columns)

    # Speed comes first and alone: what else runs on a device changes it.
    outcomes = carry_out_all(speed, options.gpus, 1, work)
    outcomes += carry_out_all(quality, options.gpus, options.parallel, work)
    if options.record:
        files.write_text(options.record, json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print("\n" + summary(outcomes, columns, table.get("goal")))
    print(f"\n{time.monotonic() - began:.0f} s for all of it")
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
