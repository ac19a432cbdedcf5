"""Runs `run.sh` for every config, order, query time and seed, some at a time, and prints a table of test metrics.

    python experiments/2026-11-28-small-protocol/all.py --data DATA --runs RUNS [--processes 36] [--seconds 300]

DATA is the folder that `prepare.sh` made. Runs that are done are not repeated. GPUS=4 in the environment
spreads the runs over four GPUs.
"""

import argparse
import json
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

CONFIGS = ("retrieval", "two_tower", "generator", "parallel")
ORDERS, TIMES, SEEDS = ("file", "shuffle"), ("TARGET", "LAST_EVENT"), (1, 2, 3)
METRICS = ("hit_rate@10", "ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds

    def run(case: tuple) -> None:
        left = end - time.monotonic()
        if left > 0:
            command = [Path(__file__).with_name("run.sh"), options.data, options.runs, *map(str, case)]
            try:
                if code := subprocess.run(command, timeout=left).returncode:
                    print(case, "ended with", code)
            except subprocess.TimeoutExpired:
                print(case, "was not done in time")

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(run, ((*rest, seed) for seed, *rest in product(SEEDS, CONFIGS, ORDERS, TIMES))))
    print("| config | ties | query_time | seeds | seen removed | seen kept |\n| --- | --- | --- | --- | --- | --- |")
    for case in product(CONFIGS, ORDERS, TIMES):
        paths = [options.runs / ("-".join((*case, str(seed))) + ".remove.json") for seed in SEEDS]
        done = [path for path in paths if path.with_name(path.name.replace("remove", "keep")).exists()]
        if done:
            kept = [path.with_name(path.name.replace("remove", "keep")) for path in done]
            print("|", " | ".join([*case, str(len(done)), cell(done), cell(kept)]), "|")


def cell(paths: list[Path]) -> str:
    """Mean and standard deviation of each metric over files of metrics."""
    made = [json.loads(path.read_text())["metrics"] for path in paths]
    parts = []
    for metric in METRICS:
        values = [metrics[metric] for metrics in made]
        spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
        parts.append(f"{statistics.mean(values):.4f}{spread}")
    return " / ".join(parts)


if __name__ == "__main__":
    main()
