#!/usr/bin/env python3
"""Where warps wait, by instruction: stalls.py FILE KERNEL NUMBER.

FILE: what `ncu --import REPORT --page source --csv` prints, of a report with `--section SourceCounters`.
"""

import csv
import sys
from pathlib import Path

SAMPLES = "Warp Stall Sampling (All Samples)"
path, kernel, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
head, body, inside = [], [], False
for row in csv.reader(path.open()):
    if row and row[0] == "Kernel Name":
        inside = row[1] == kernel
    elif inside and row and row[0] == "Address":
        head = row
    elif inside and len(row) > 5:
        body.append(dict(zip(head, row, strict=False)))
reasons = [name for name in head if name.startswith("stall_") and "Not" not in name]


def count(line: dict[str, str], name: str) -> int:
    return int(float(line[name] or 0))


total = sum(count(line, SAMPLES) for line in body)
shares = {name: sum(count(line, name) for line in body) / total for name in reasons}
print(kernel, {name: round(share, 3) for name, share in sorted(shares.items(), key=lambda one: -one[1])[:8]})
longest = sorted(range(len(body)), key=lambda at: -count(body[at], SAMPLES))[:number]
for at in sorted(longest):
    line = body[at]
    why = max(reasons, key=lambda name: count(line, name))
    print(f"{at:6d} {count(line, SAMPLES) / total:.3f} {why:<18} {line['Source'].strip()[:90]}")
