"""How far two runs are apart: the largest relative difference of each loss at the same step, and of metrics.

python experiments/2026-11-22-gpu-nccl/curves.py RUN OTHER
"""

import json
import sys
from pathlib import Path


def lines(folder: Path, kind: str) -> dict[int, dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in found if line["kind"] == kind}


def main() -> None:
    runs = [Path(one) for one in sys.argv[1:3]]
    for kind, key in (("train", "losses"), ("evaluation", "metrics")):
        one, other = (lines(run, kind) for run in runs)
        for step in sorted(one.keys() & other.keys()):
            pairs = {name: (one[step][key][name], other[step][key][name]) for name in one[step][key]}
            apart = {n: abs(a - b) / max(abs(a), 1e-12) for n, (a, b) in pairs.items() if a is not None}
            worst = max(apart, key=lambda name: apart[name])
            print(f"{kind} {step:>5}  {worst} {pairs[worst][0]} {pairs[worst][1]}  {apart[worst]:.1e}")
    for name in ("test_metrics.json", "validation_metrics.json"):
        if all((run / name).exists() for run in runs):
            one, other = (json.loads((run / name).read_text())["metrics"] for run in runs)
            apart = {n: abs(one[n] - other[n]) / max(abs(one[n]), 1e-12) for n in one if one[n] is not None}
            worst = max(apart, key=lambda name: apart[name])
            print(f"{name}: {worst} {one[worst]} {other[worst]}  {apart[worst]:.1e}")


if __name__ == "__main__":
    main()
