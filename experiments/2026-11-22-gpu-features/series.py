"""`scripts/run_table.py` for a machine that is there for minutes: runs share processes, results lie on disk.

    python experiments/2026-11-22-gpu-features/series.py TABLE.json --runs DIR --outcomes DIR \
        [--parallel 5] [--seeds 1 2 3] [--variant NAME ...] [--set PATH=VALUE] [--timing-steps 200]

A start costs 20 to 40 s where five processes start at once (imports, readers, kernels): each of --parallel
processes trains and evaluates one run after the other. All variants of one seed come first, then those of
the next, so that what is missing when the time is up is whole seeds. With --timing-steps nothing is
evaluated: each variant does that many steps, alone where --parallel is 1, for its step time and memory. Each
run leaves OUTCOMES/NAME.json (what came of it) and NAME.jsonl (its metrics.jsonl).
"""

import argparse
import dataclasses
import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts import run_table


def main() -> int:
    options = parse(sys.argv[1:])
    options.runs.mkdir(parents=True, exist_ok=True)
    options.outcomes.mkdir(parents=True, exist_ok=True)
    if options.process is None:
        command = [sys.executable, __file__, *sys.argv[1:], "--process"]
        processes = [subprocess.Popen([*command, str(number)]) for number in range(options.parallel)]
        code = max((process.wait() for process in processes), default=0)
        print(summary(options), flush=True)
        return code
    return serve(options)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--outcomes", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--timing-steps", type=int, default=0)
    parser.add_argument("--process", type=int, help="made by this program")
    return parser.parse_args(arguments)


def runs_of(options: argparse.Namespace) -> list[run_table.Run]:
    """In the order in which they are trained: seed by seed."""
    table = json.loads(options.table.read_text())
    table["set"] = [*table.get("set", []), *options.set]
    quality, speed = run_table.runs_of(table, options.seeds, options.variant, options.timing_steps)
    if options.timing_steps:
        return speed
    return sorted(quality, key=lambda run: options.seeds.index(run.seed))


def serve(options: argparse.Namespace) -> int:
    """Takes run after run that no other process has taken."""
    code = 0
    for run in runs_of(options):
        try:
            (options.runs / f"{run.name}.taken").touch(exist_ok=False)
        except FileExistsError:
            continue
        began = time.perf_counter()
        outcome = carry_out(run, options.runs / run.name)
        found = dataclasses.asdict(outcome) | waits(options.runs / run.name)
        found["seconds"] = time.perf_counter() - began
        (options.outcomes / f"{run.name}.json").write_text(json.dumps(found, indent=1))
        metrics = options.runs / run.name / "metrics.jsonl"
        if metrics.exists():
            shutil.copy(metrics, options.outcomes / f"{run.name}.jsonl")
        print(f"{run.name}: {outcome.error or 'done'}, {found['seconds']:.0f} s", flush=True)
        code |= bool(outcome.error)
    return code


def carry_out(run: run_table.Run, place: Path) -> run_table.Outcome:
    """Trains and evaluates in this process."""
    import torch

    from recsys import cli, evaluate, train

    outcome = run_table.Outcome(run.variant, run.seed)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    chosen = [part for override in run.overrides for part in ("--set", override)]
    code = cli.main("train", train.run, ["--config", run.config, "--run-dir", str(place), *chosen])
    if not code and run.split:
        flags = ["--run-dir", str(place), "--split", run.split]
        code = cli.main("evaluate", evaluate.run, flags, add_flags=evaluate.add_flags)
    if code:
        outcome.error = f"exit code {code}"
        return outcome
    if run.split:
        outcome.metrics = json.loads((place / f"{run.split}_metrics.json").read_text())["metrics"]
    outcome.ms, outcome.memory_mb = run_table.speed_of(place, run_table.rows_of_a_step(run))
    return outcome


def waits(place: Path) -> dict[str, float | None]:
    """Share of time that a run waited for data, without the first third."""
    path = place / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    logged = [line["data_wait"] for line in lines if line["kind"] == "train"]
    return {"data_wait": statistics.median(logged[len(logged) // 3 :]) if logged else None}


def summary(options: argparse.Namespace) -> str:
    """The table of what is in OUTCOMES."""
    outcomes = []
    for path in sorted(options.outcomes.glob("*.json")):
        found = json.loads(path.read_text())
        names = {field.name for field in dataclasses.fields(run_table.Outcome)}
        outcomes.append(run_table.Outcome(**{key: value for key, value in found.items() if key in names}))
    return run_table.summary(outcomes, json.loads(options.table.read_text()).get("columns", []))


if __name__ == "__main__":
    sys.exit(main())
