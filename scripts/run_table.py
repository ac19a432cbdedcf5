#!/usr/bin/env python3
"""Trains the variants of a table with several seeds each, evaluates them, and prints mean and spread.

    python scripts/run_table.py TABLE.json --runs runs/table --record record.json \
        [--seeds 1 2 3] [--variant NAME ...] [--gpus 4] [--parallel 3] [--timing-steps 200]

TABLE.json:

    {"set": ["data.num_workers=1"],                          for every run
     "columns": ["is_click/auc", "is_click/gauc"],           metrics to print
     "split": "test",                                        what is evaluated; "test" if absent
     "variants": [{"name": "plain", "config": "configs/x.config", "set": ["PATH=VALUE"]}, ...]}

Each run is `python -m recsys.train` and then `python -m recsys.evaluate` in processes of its own, --parallel
of them at a time on each of --gpus devices; output goes to RUNS/NAME-SEED.log. A run that has ended is not
trained again, one that broke off goes on. With --timing-steps each variant is trained once more for that many
steps, alone on its device, for its step time and memory; the first third of the steps is not counted.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recsys import config, files
from recsys.flags import Parser, positive

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its folder. variant: whose run it is. seed: `train.seed`; None for a run that is only timed.
        config: file. overrides: values of --set. split: what is evaluated; "" for nothing.
    """

    name: str
    variant: str
    seed: int | None
    config: str
    overrides: tuple[str, ...]
    split: str


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        variant, seed: of the run. error: what went wrong, or "".
        metrics: of the split. ms: a step, median; memory_mb: at most. Both None where it was not timed.
    """

    variant: str
    seed: int | None
    error: str = ""
    metrics: dict[str, float | None] = field(default_factory=dict)
    ms: float | None = None
    memory_mb: float | None = None


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


def carry_out(run: Run, folder: Path, device: int | None) -> Outcome:
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
    with log.open("w", encoding="utf-8") as stream:
        for command in commands:
            done = subprocess.run(
                [sys.executable, "-m", *command],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                check=False,
            )
            if done.returncode:
                outcome.error = f"{command[0]} ended with exit code {done.returncode}: see {log}"
                return outcome
    if run.split:
        outcome.metrics = json.loads((place / f"{run.split}_metrics.json").read_text())["metrics"]
    else:
        outcome.ms, outcome.memory_mb = speed_of(place, rows_of_a_step(run))
    return outcome


def rows_of_a_step(run: Run) -> int:
    """Rows that one process trains on in a step."""
    pipeline = config.prepare(run.config, list(run.overrides)).pipeline
    return pipeline.data.batch_size * pipeline.train.accumulate_batches


def speed_of(folder: Path, rows: int) -> tuple[float, float]:
    """(ms a step, MB at most) of a run's metrics.jsonl, whose first third is not looked at."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
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


def summary(outcomes: Sequence[Outcome], columns: Sequence[str]) -> str:
    """A Markdown table: a line a variant, mean and standard deviation over seeds."""
    lines = [
        "| variant | seeds | " + " | ".join(columns) + " | ms a step | MB |",
        "| --- | --- |" + " --- |" * (len(columns) + 2),
    ]
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.variant == variant and not outcome.error]
        seeds = [outcome for outcome in mine if outcome.seed is not None]
        cells = [_mean([outcome.metrics.get(column) for outcome in seeds]) for column in columns]
        timed = next((outcome for outcome in mine if outcome.ms is not None), None)
        cells += ["", ""] if timed is None else [f"{timed.ms:.1f}", f"{timed.memory_mb:.0f}"]
        lines.append(f"| {variant} | {len(seeds)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return ""
    spread = f" ± {statistics.stdev(there):.4f}" if len(there) > 1 else ""
    return f"{statistics.mean(there):.4f}{spread}"


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

    def work(run: Run, device: int | None) -> Outcome:
        return carry_out(run, options.runs.resolve(), device)

    # Speed comes first and alone: what else runs on a device changes it.
    outcomes = carry_out_all(speed, options.gpus, 1, work)
    outcomes += carry_out_all(quality, options.gpus, options.parallel, work)
    if options.record:
        files.write_text(options.record, json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print("\n" + summary(outcomes, table.get("columns", [])))
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
