"""Measures how long training stands still for a state of 1 GiB, and what steps cost while it is written."""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from recsys.training.checkpoint import Checkpoints
from recsys.training.state import Inputs, Progress, SavedState, capture_rng

STATES = 5
TENSORS = {f"model.{number}": torch.randn(2**20, 32) for number in range(8)}
MATRIX = torch.randn(256, 256)


def state(step: int) -> SavedState:
    """A state with nothing in it but its step."""
    return SavedState(Progress(step=step), [capture_rng(torch.device("cpu"))], Inputs([], {}), "", {}, 1)


def step() -> float:
    """Seconds that some products of matrices take."""
    began = time.perf_counter()
    for _ in range(20):
        torch.mm(MATRIX, MATRIX)
    return time.perf_counter() - began


def main(folder: str) -> None:
    """Prints one line per state; the folder decides the disk."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = [step() for _ in range(100)]
    print(f"step alone: {1e3 * sum(alone) / len(alone):.1f} ms")
    with tempfile.TemporaryDirectory(dir=folder) as path:
        checkpoints = Checkpoints(Path(path))
        for number in range(1, STATES + 1):
            began = time.perf_counter()
            checkpoints.begin(TENSORS, state(number))
            still, steps = time.perf_counter() - began, []
            while checkpoints.written() is None:
                steps.append(step())
            written = time.perf_counter() - began
            print(f"still {still:.2f} s, written after {written:.1f} s", end=", ")
            print(f"step {1e3 * sum(steps) / len(steps):.1f} ms, longest {1e3 * max(steps):.0f} ms")
        for number in range(STATES + 1, 2 * STATES + 1):
            began = time.perf_counter()
            checkpoints.save(TENSORS, state(number))
            print(f"waiting until it is written: {time.perf_counter() - began:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
