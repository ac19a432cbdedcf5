"""Samples a second of a whole training step on the ranks that torchrun starts, the same batch on each.

    torchrun --standalone --nproc-per-node 4 experiments/2026-11-22-gpu-nccl/scaling.py [--record FILE]

The step is that of `recsys.train`: TorchRec's pipeline, tables cut over ranks, the one sum of losses,
averaged gradients, clipping, both optimizers. Only reading is left out: four batches of each rank are made
beforehand and used in turn.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist

from recsys import config
from recsys.training.distributed import Processes, gather, process_group
from recsys.training.session import open_session
from recsys.training.trainer import _pipeline

CONFIG = Path(__file__).with_name("scaling.config")
LONG = ("data.batch_size=16",)
CASES = {
    "16 rows of 4,096": LONG,
    "16 rows of 4,096, full attention": (
        *LONG,
        "model.ranker.mixer.hstu={num_heads: 4 qk_dim: 64 num_layers: 6}",
    ),
    "64 rows of 512": (
        "data.batch_size=64",
        "data.max_history_len=512",
        "data.train.synthetic.min_history_len=512",
        "data.train.synthetic.max_history_len=512",
    ),
    "16 rows of 4,096, replicated tables": (*LONG, "model.embedding.placement=REPLICATED"),
}
"""Changes of scaling.config."""


def measure(name: str, steps: int, processes: Processes) -> dict:
    """Collective."""
    pipeline = config.prepare(CONFIG, list(CASES[name])).pipeline
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(pipeline, Path(folder), processes)
        batches = list(itertools.islice(session.train.epoch(0), 4))
        runner, endless = _pipeline(session), itertools.cycle(batches)
        for _ in range(10):
            result = runner.progress(endless)
        times = []
        for _ in range(steps):
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            result = runner.progress(endless)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            runner.progress(endless)
        torch.cuda.synchronize()
        free = (time.perf_counter() - began) / steps
    rows = pipeline.data.batch_size * processes.world_size
    slowest = [statistics.median(many) for many in gather(times)]
    memory = max(gather(torch.cuda.max_memory_allocated())) / 2**20
    return {
        "case": name,
        "ranks": processes.world_size,
        "rows": rows,
        "tokens": result.tokens,
        "ms": 1e3 * max(gather(free)),
        "ms_started_together": 1e3 * max(slowest),
        "samples_per_s": rows / max(gather(free)),
        "peak_mb": memory,
        "loss": result.loss,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    with process_group() as processes:
        found = []
        for name in options.case or CASES:
            found.append(measure(name, options.steps, processes))
            if processes.is_main:
                print(json.dumps(found[-1]), flush=True)
                if options.record:
                    options.record.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
