#!/usr/bin/env python3
"""GPU tests under compute-sanitizer's memcheck, in several processes: what passed, per file, and all errors.

    python experiments/2026-11-22-gpu-bias/memcheck_tests.py FOLDER PATH [PATH ...] [--processes 12]
        [--seconds 600] [--deselect NAME ...]

Each tensor is in memory of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), between 4 KB that nobody may touch, but
in tests of CAPTURED, whose graphs or figures need PyTorch's allocator. What does not end in time is named.
"""

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-m", "gpu"]
CAPTURED = ("test_replays_of_a_graph", "test_the_cache_is_not_copied", "test_memory_of_a_token")
SAID = re.compile(r"^(tests/\S+?\.py)::(.*) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


def collected(paths: list[str]) -> list[str]:
    command = [*PYTEST, "-q", "--collect-only", *paths]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in said.splitlines() if "::" in line]


def started(folder: Path, name: str, tests: list[str]) -> subprocess.Popen:
    command = ["compute-sanitizer", "--report-api-errors", "no", "--target-processes", "all"]
    command += ["--print-limit", "20", "--log-file", str(folder / f"{name}.%p.errors")]
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if name != "cached":
        command += ["--padding", "4096"]
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with (folder / f"{name}.tests").open("w") as out:
        return subprocess.Popen(
            [*command, *PYTEST, "-v", "--tb=short", "--show-capture=no", *tests],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--deselect", nargs="*", default=[])
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    tests = [test for test in collected(options.paths) if not any(one in test for one in options.deselect)]
    kept = [test for test in tests if any(one in test for one in CAPTURED)]
    others = [test for test in tests if test not in kept]
    groups = {str(n): others[n :: options.processes] for n in range(options.processes)} | {"cached": kept}
    running = {name: started(options.folder, name, group) for name, group in groups.items() if group}
    for process in running.values():
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
    said = "\n".join((options.folder / f"{name}.tests").read_text() for name in running)
    states = {f"{file}::{test}": state for file, test, state in SAID.findall(said)}
    for file in dict.fromkeys(test.split("::")[0] for test in tests):
        mine = [states.get(test, "NOT ENDED") for test in tests if test.startswith(file + "::")]
        print(file, dict(collections.Counter(mine)), flush=True)
    for test in tests:
        if states.get(test) not in ("PASSED", "SKIPPED"):
            print(states.get(test, "NOT ENDED"), test)
    summaries = collections.Counter()
    for name in running:
        text = "".join(path.read_text() for path in options.folder.glob(f"{name}.*.errors"))
        found = re.findall(r"ERROR SUMMARY: (.*)", text) or ["no summary: stopped"]
        summaries.update(found)
        print(name, found, len(re.findall("^========= (?:Invalid|Error|Program hit)", text, re.MULTILINE)))
    print(dict(summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
