#!/usr/bin/env python3
"""GPU tests under compute-sanitizer's memcheck, in several processes: what passed, per file, and all errors.

    python experiments/2026-11-22-gpu-bias/memcheck_tests.py FOLDER PATH [PATH ...] [--processes 5]
        [--group 10] [--seconds 600] [--examples 3]

Each tensor is in memory of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), between 4 KB that nobody may touch, but
in tests of CAPTURED, whose graphs or figures need PyTorch's allocator; nor may the tool keep Python's frames
there, which keep tensors. PyTorch's own kernels, of the references, are not looked at. Of random layouts a
few examples. What does not end in time is named. A process is for a group of tests: with memory padded, what
one takes of the GPU's grows by about a GB a test.
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

OPTIONS = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "gpu", "--tb=short", "--show-capture=no"]
CAPTURED = ("test_replays_of_a_graph", "test_the_cache_is_not_copied", "test_memory_of_a_token")
SAID = re.compile(r"^(passed|failed|skipped) [\d.]+ s (.*)$", re.MULTILINE)


class Reporter:
    """Says at once how each test ended; runs a few examples of those by hypothesis."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def pytest_collection_modifyitems(self, items):
        import hypothesis

        for item in items:
            test = item.obj
            if found := getattr(test, "_hypothesis_internal_use_settings", None):
                few = min(self.examples, found.max_examples)
                test._hypothesis_internal_use_settings = hypothesis.settings(found, max_examples=few)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            print(f"\n{report.outcome} {report.duration:.1f} s {report.nodeid}", flush=True)
        if report.failed:
            print(report.longreprtext, flush=True)


def run(tests: list[str], examples: int) -> int:
    """In the process that is looked at."""
    import pytest

    return pytest.main([*OPTIONS, *tests], plugins=[Reporter(examples)])


def collected(paths: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--collect-only", *paths]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line for line in said.splitlines() if "::" in line]


def started(folder: Path, name: str, tests: list[str], examples: int) -> subprocess.Popen:
    command = ["compute-sanitizer", "--report-api-errors", "no", "--target-processes", "all"]
    command += ["--kernel-name-exclude", "kns=native", "--print-limit", "20"]
    command += ["--log-file", str(folder / f"{name}.%p.errors")]
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if name != "captured":
        command += ["--padding", "4096"]
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    else:
        command += ["--show-backtrace", "no"]
    (folder / f"{name}.list").write_text("\n".join(tests))
    own = [sys.executable, __file__, str(folder), str(folder / f"{name}.list"), "--run"]
    with (folder / f"{name}.tests").open("w") as out:
        return subprocess.Popen(
            [*command, *own, "--examples", str(examples)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )


def report(folder: Path, tests: list[str], names: list[str]) -> None:
    said = "\n".join((folder / f"{name}.tests").read_text() for name in names)
    states = {test: state for state, test in SAID.findall(said)}
    for file in dict.fromkeys(test.split("::")[0] for test in tests):
        mine = [states.get(test, "not ended") for test in tests if test.startswith(file + "::")]
        print(file, dict(collections.Counter(mine)), flush=True)
    for test in tests:
        if states.get(test) not in ("passed", "skipped"):
            print(states.get(test, "not ended"), test)
    for name in names:
        text = "".join(path.read_text() for path in folder.glob(f"{name}.*.errors"))
        summary = re.findall(r"ERROR SUMMARY: (.*)", text) or ["no summary: stopped"]
        kinds = collections.Counter(re.findall(r"^========= ([A-Z][\w ]+)", text, re.MULTILINE))
        print(name, summary, {kind: number for kind, number in kinds.items() if "SUMMARY" not in kind})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--group", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        return run(Path(options.paths[0]).read_text().splitlines(), options.examples)
    end = time.monotonic() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    tests = collected(options.paths)
    kept = [test for test in tests if any(one in test for one in CAPTURED)]
    others = [test for test in tests if test not in kept]
    chunks = [others[n : n + options.group] for n in range(0, len(others), options.group)]
    groups = {str(n): chunk for n, chunk in enumerate(chunks)} | ({"captured": kept} if kept else {})
    running: dict[str, subprocess.Popen] = {}
    begun = []
    while (len(begun) < len(groups) or running) and time.monotonic() < end:
        for name in [name for name, process in running.items() if process.poll() is not None]:
            del running[name]
        for name in list(groups)[len(begun) :][: options.processes - len(running)]:
            running[name] = started(options.folder, name, groups[name], options.examples)
            begun.append(name)
        time.sleep(0.2)
    for process in running.values():
        os.killpg(process.pid, signal.SIGTERM)
    report(options.folder, tests, begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
