"""Sums up a trace that `recsys.train --profile N` wrote: kernels by time, and when the GPU has nothing to do.

    python trace.py RUN/profile.json.gz [--kernels 40] [--gaps 12]

A step is the time between the starts of two consecutive forward passes of the lookup's first kernel, which is
taken as the kernel given by --mark; times are means over the whole steps in the trace.
"""

import argparse
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--mark", default="split_embedding_nobag_codegen_forward", help="a kernel of each step"
    )
    parser.add_argument("--kernels", type=int, default=40)
    parser.add_argument("--gaps", type=int, default=12)
    arguments = parser.parse_args()
    events = json.loads(gzip.open(arguments.trace, "rt").read())["traceEvents"]
    work = sorted((e for e in events if e.get("cat") in KINDS), key=lambda e: e["ts"])
    marks = [e["ts"] for e in work if arguments.mark in e["name"]]
    # Several tables have one kernel each: a step begins where the mark was last seen long ago.
    starts = [b for a, b in zip([float("-inf"), *marks], marks, strict=False) if b - a > 5000]
    begin, end = starts[0], starts[-1]
    steps = len(starts) - 1
    work = [e for e in work if begin <= e["ts"] < end]
    host = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "user_annotation", "cuda_driver")]
    gaps, busy, last, previous = [], 0.0, begin, "start"
    for event in work:
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > last:
            gaps.append((start - last, last, previous, event["name"]))
        busy += max(0.0, stop - max(start, last))
        if stop > last:
            last, previous = stop, event["name"]
    print(
        f"{steps} steps of {(end - begin) / steps / 1e3:.2f} ms, the GPU is busy for {busy / steps / 1e3:.2f}"
    )
    for low, high in ((0, 10), (10, 100), (100, 1000), (1000, 1e9)):
        chosen = [gap for gap, *_ in gaps if low <= gap < high]
        print(
            f"gaps of {low} to {high:g} us: {len(chosen) / steps:.0f} a step, {sum(chosen) / steps / 1e3:.2f} ms"
        )
    for gap, at, before, after in sorted(gaps, reverse=True)[: arguments.gaps]:
        print(f"\n{gap:.0f} us at {(at - begin) / 1e3:.1f} ms, between {short(before)} and {short(after)}")
        inside = [e for e in host if e["ts"] < at + gap and e["ts"] + e["dur"] > at and e["dur"] > gap / 4]
        for e in sorted(inside, key=lambda e: -e["dur"])[:10]:
            print(f"    host: {e['dur']:.0f} us {e['name'][:90]} (thread {e['tid']})")
    sums = defaultdict(lambda: [0.0, 0])
    for event in work:
        sums[short(event["name"])][0] += event["dur"]
        sums[short(event["name"])][1] += 1
    print()
    for name, (time, count) in sorted(sums.items(), key=lambda item: -item[1][0])[: arguments.kernels]:
        print(f"{time / steps / 1e3:8.3f} ms in {count / steps:6.1f} launches  {name}")


def short(name: str) -> str:
    return re.sub(r"<.*", "", name)[:80]


if __name__ == "__main__":
    main()
