"""Prints the metrics of runs and of their packages, and the differences, from what `recsys.evaluate` printed.

    python experiments/2026-11-28-package-parity/table.py RUNS kuairand ml-1m

INT8 and INT4 packages compute in FP32, so they are compared with the run in FP32. The last line of each table is
the largest difference of an answer from that of the evaluated model, |a - b| / max(1, |b|).
"""

import re
import sys
from pathlib import Path

METRIC = re.compile(r"^(\S+) +(-?[\d.]+|nan)$", re.MULTILINE)
DIFFERENCE = re.compile(r"largest difference from the evaluated model: (\S+)")
BASE = {"FP32": "FP32", "BF16": "BF16", "INT8": "FP32", "INT4": "FP32"}


def read(path: Path) -> str:
    """Returns the text of a file, empty if the command before it failed."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(runs: Path, names: list[str]) -> None:
    """Prints a table for each run."""
    for name in names:
        printed = {kind: read(runs / f"{name}.{kind}.txt") for kind in BASE}
        values = {kind: dict(METRIC.findall(text)) for kind, text in printed.items()}
        measured = {p: dict(METRIC.findall(read(runs / f"{name}.run-{p}.txt"))) for p in ("FP32", "BF16")}
        print(f"\n| {name} | run FP32 | run BF16 | " + " | ".join(f"{k} | - run" for k in BASE) + " |")
        print("| --- " * (3 + 2 * len(BASE)) + "|")
        for metric in measured["FP32"]:
            if metric.partition("/")[0] == "loss":
                continue
            cells = [measured[precision].get(metric, "missing") for precision in measured]
            for kind, base in BASE.items():
                value, expected = values[kind].get(metric), measured[base].get(metric)
                present = value is not None and expected is not None
                cells += [value or "missing", f"{float(value) - float(expected):+.5f}" if present else ""]
            print(f"| {metric} | " + " | ".join(cells) + " |")
        differences = [DIFFERENCE.search(text) for text in printed.values()]
        largest = " | ".join(f"{match[1] if match else 'missing'} | " for match in differences)
        print(f"| largest difference | | | {largest}|")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
