"""Step time, GPU time and memory of the variants of a table, one beside the other on a GPU of their own.

    python experiments/2026-11-22-gpu-features/timing.py TABLE.json --batch 64 512 [--record FILE]

Each step is one of `recsys.train` on real rows, with everything but reading: six batches are made beforehand
and used in turn, the same for all variants. Variants take turns, five steps at a time; the time of a step is
the median over rounds. GPU time is the sum of kernel times in three further steps; where it is far below the
step's time, the step waits for the host. Memory is the most that the variant adds: weights, optimizer state,
batches in flight and the steps.
"""

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch.profiler import ProfilerActivity, profile

from recsys import config
from recsys.data.batch import Batch
from recsys.training.distributed import Processes, process_group
from recsys.training.session import open_session
from recsys.training.trainer import _pipeline

BATCHES, STEPS = 6, 5


class Variant:
    """A variant that is ready for its next step."""

    def __init__(self, name: str, path: str, overrides: list[str], folder: Path, processes: Processes):
        self.name, self.times = name, []
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.session = open_session(config.prepare(path, overrides).pipeline, folder, processes)
        batches = list(itertools.islice(self.session.train.epoch(0), BATCHES))
        self.tokens = statistics.mean(batch.sequences.total_len for batch in batches)
        self.batches: Iterator[Batch] = itertools.cycle(batches)
        self.pipeline = _pipeline(self.session)
        for _ in range(2 * BATCHES):
            result = self.pipeline.progress(self.batches)
        self.gflop = result.flop / 1e9
        torch.cuda.synchronize()
        self.memory = torch.cuda.max_memory_allocated() - held

    def steps(self) -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            self.pipeline.progress(self.batches)
        torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - began) / STEPS)

    def gpu_ms(self) -> float:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                self.pipeline.progress(self.batches)
            torch.cuda.synchronize()
        return sum(event.self_device_time_total for event in seen.key_averages()) / 3e3


def measure(table: dict, batch: int, rounds: int, processes: Processes) -> list[dict]:
    """All variants at one batch size."""
    common = [*table.get("set", []), f"data.batch_size={batch}", "data.num_workers=0"]
    with contextlib.ExitStack() as stack:
        variants = []
        for one in table["variants"]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            overrides = [*common, *one.get("set", [])]
            variants.append(Variant(one["name"], one["config"], overrides, folder, processes))
        for _ in range(rounds):
            for variant in variants:
                variant.steps()
        plain = variants[0]
        found = []
        for variant in variants:
            ratios = [slow / own for slow, own in zip(plain.times, variant.times, strict=True)]
            found.append(
                {
                    "variant": variant.name,
                    "rows": batch,
                    "tokens": variant.tokens,
                    "ms": statistics.median(variant.times),
                    "least_ms": min(variant.times),
                    "speedup": statistics.median(ratios),
                    "gpu_ms": variant.gpu_ms(),
                    "useful_gflop": variant.gflop,
                    "peak_mb": variant.memory / 2**20,
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def fill_workspaces() -> None:
    """cuBLAS keeps memory from its first product on (65 MB), which is not the first variant's."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, device="cuda", dtype=dtype)
        layer(torch.ones(64, 64, device="cuda", dtype=dtype)).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("table", type=Path)
    parser.add_argument("--batch", type=int, nargs="*", required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    table, found = json.loads(options.table.read_text()), []
    with process_group() as processes:
        fill_workspaces()
        for batch in options.batch:
            found += measure(table, batch, options.rounds, processes)
            if options.record:
                options.record.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
