#!/usr/bin/env python3
"""Merges the results of the GPU benchmarks in a folder into one list.

    python scripts/gpu_records.py FOLDER

Reads ops.json, stu.json, logp.json, topk.json, jagged.json, step.json and serving.json, as far as they
exist, and writes record.json: a list of `{op, backend, shape, pass, ms, tflops, peak_mb, ok, commit}`.
`pass` is `fwd`, `bwd` or `fwd+bwd`; `peak_mb` is the memory in MiB beyond the arguments of the call, or all
memory of a training step; null marks a value that the benchmark does not measure. Other measurements (bytes
per second, the host's time, recall, ratios) stay in the benchmark's file. Exit code 1 if a result is wrong
or there is none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

FIELDS = ("op", "backend", "shape", "pass", "ms", "tflops", "peak_mb", "ok", "commit")

WAYS = ("uncached", "one_pass", "prefill", "eager", "cached", "pieces")
"""Ways of scoring, each timed alone; `bench_serving.py` explains them."""


def _as_it_is(entry: Entry) -> list[Entry]:
    """Converts records of ops, layers and moved rows; `extra_mb`, if given, is the peak."""
    return [{"tflops": None, "peak_mb": entry.get("extra_mb")} | entry]


def _top_k(entry: Entry) -> list[Entry]:
    """Converts records of exact search on a GPU; an index is searched on the CPU."""
    if entry["search"] != "exact":
        return []
    flop = 2 * entry["queries"] * entry["items"] * entry["dim"]
    return [
        entry
        | {
            "op": "top_k",
            "shape": "B{queries} V{items} D{dim} k{k} {dtype}".format_map(entry),
            "pass": "fwd",
            "ms": entry["milliseconds"],
            "tflops": flop / entry["milliseconds"] / 1e9,
            "peak_mb": entry["extra_mib"],
            # Wrong answers are not recorded.
            "ok": True,
        }
    ]


def _step(entry: Entry) -> list[Entry]:
    shape = "{variant} B{batch} L{history} E{embedding_dim} {num_layers} layers".format_map(entry)
    return [entry | {"op": "training_step", "shape": shape, "pass": "fwd+bwd"}]


def _scoring(entry: Entry) -> list[Entry]:
    shape = "{variant} B{rows} L{history} candidates {candidates}".format_map(entry)
    common = {"op": "scoring", "shape": shape, "pass": "fwd", "ms": None, "tflops": None, "peak_mb": None}
    times = {way: entry.get(f"{way}_ms") for way in WAYS}
    timed = [{"shape": f"{shape}, {way}", "ms": ms} for way, ms in times.items() if ms is not None]
    return [entry | common | timing for timing in timed or [{}]]


FORMS: dict[str, Callable[[Entry], list[Entry]]] = {
    "ops": _as_it_is,
    "stu": _as_it_is,
    "logp": _as_it_is,
    "topk": _top_k,
    "jagged": _as_it_is,
    "step": _step,
    "serving": _scoring,
}


def records(folder: Path) -> list[Entry]:
    """Returns the contents of record.json for the files of a folder."""
    measurements = []
    for name, form in FORMS.items():
        path = folder / f"{name}.json"
        entries: Iterable[Entry] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else ()
        measurements += [
            {field: made[field] for field in FIELDS} for entry in entries for made in form(entry)
        ]
    return measurements


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Merges the results of the GPU benchmarks in a folder into one list.", allow_abbrev=False
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    measurements = records(folder)
    if not measurements:
        expected = ", ".join(f"{name}.json" for name in FORMS)
        print(f"{folder}: there is nothing to merge; expected {expected}", file=sys.stderr)
        return 1
    (folder / "record.json").write_text(json.dumps(measurements, indent=1) + "\n", encoding="utf-8")
    wrong = [entry for entry in measurements if entry["ok"] is False]
    for entry in wrong:
        print("WRONG: {op} {backend} {shape} {pass}".format_map(entry), file=sys.stderr)
    print(f"{folder / 'record.json'}: {len(measurements)} measurements, {len(wrong)} of them wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
