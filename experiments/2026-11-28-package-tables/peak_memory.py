"""Runs a command and prints the peak memory of the largest of its processes, in MiB: all, and anonymous only.

    python experiments/2026-11-28-package-tables/peak_memory.py python -m recsys.export --run-dir RUN

Pages of mapped files count as memory, but not as anonymous: the system drops them when it needs the space.
"""

import os
import subprocess
import sys
import time

FIELDS = ("PPid", "VmRSS", "RssAnon")


def processes() -> dict[int, dict[str, int]]:
    """Returns parent, and memory in KiB, of each process by its id."""
    result = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/status") as file:
                lines = [line.split() for line in file if line.startswith(FIELDS)]
        except OSError:
            # The process has ended.
            continue
        result[int(name)] = {line[0].rstrip(":"): int(line[1]) for line in lines}
    return result


def main(command: list[str]) -> int:
    """Runs the command and returns its exit code."""
    started, peak = subprocess.Popen(command), {"VmRSS": 0, "RssAnon": 0}
    while started.poll() is None:
        now = processes()
        tree = {started.pid}
        for _ in range(5):
            tree |= {process for process, status in now.items() if status.get("PPid") in tree}
        for process in tree & now.keys():
            peak = {name: max(most, now[process].get(name, 0)) for name, most in peak.items()}
        time.sleep(0.25)
    print(f"peak of one process: {peak['VmRSS'] >> 10} MiB, anonymous {peak['RssAnon'] >> 10} MiB")
    return started.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
