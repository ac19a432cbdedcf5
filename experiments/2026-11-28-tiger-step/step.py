"""Times training steps of an encoder of codes on real rows, and counts what they compute.

    python step.py --data DIR/beauty-file [--bundle rq3] [--rows 256] [--steps 30] [--set PATH=VALUE ...]

DIR/beauty-file is what `../2026-11-28-sid-quality/prepare.sh` makes. The model is that of `tiger.config` beside it.
It runs on CUDA if available. Steps are forward, loss, backward and AdamW; every step gets a batch of its own, so
its sizes are new. Memory is the peak above what model, optimizer and data take: of the allocator on CUDA, of the
process on a CPU. On a CPU, time is also given as CPU seconds, which other processes disturb less. On CUDA these say
nothing about Python, because a wait for the device is a busy loop; there the time until the last launch is given,
which nears that of the step if Python, or a wait in the step, is the bottleneck. `--profile` also prints the busiest
kernels of a step, the number of launches and the calls that wait; its own time is not that of a step.
"""

import argparse
import resource
import statistics
import time
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import profile

from recsys import config, environment
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.models import build_model, layout_rule

CONFIG = Path(__file__).parent.parent / "2026-11-28-sid-quality" / "tiger.config"


def main() -> None:
    arguments = parsed()
    environment.import_torchrec_quietly()
    root, warm = arguments.data, arguments.warm_up
    paths = [f'data.{split}.parquet.paths="{root / split}"' for split in ("train", "validation", "test")]
    paths += [f'data.vocabulary_dir="{root}/vocabulary"', f'model.generator.bundle="{root / arguments.bundle}"']
    rows = [f"data.batch_size={arguments.rows}", "data.num_workers=0"]
    pipeline = config.prepare(CONFIG, [*paths, *rows, *(arguments.set or [])]).pipeline
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = Loader.open(pipeline, "train", layout_rule(pipeline))
    batches = list(islice(loader.epoch(0), arguments.steps + warm))
    torch.manual_seed(0)
    model = build_model(pipeline).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device.type == "cuda")
    costs = [model.encode.cost(batch.layout) for batch in batches[warm:]]
    flop = statistics.mean(3 * model.flops(batch) for batch in batches[warm:])
    walls, launched, cpus, losses, before, allocator = [], [], [], [], 0, {}
    for number, batch in enumerate(batches):
        if number == warm:
            before = memory(device, start=True)
            allocator = torch.cuda.memory_stats() if device.type == "cuda" else {}
        on_device = batch.to(device)
        wait(device)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(model, optimizer, on_device)
        launched.append(1e3 * (time.perf_counter() - wall))
        wait(device)
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(time.process_time() - cpu)
        losses.append(loss.item())
    walls, launched, cpus = walls[warm:], launched[warm:], cpus[warm:]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{name}: {arguments.rows} rows, {len(walls)} steps after {warm}, torch {torch.__version__}")
    print(f"predictions {statistics.mean(cost.prefixes for cost in costs):,.0f} a step")
    print(f"tokens of the encoder {statistics.mean(cost.tokens for cost in costs):,.0f}, {flop / 1e9:,.1f} GFLOP")
    print(f"ms: median {statistics.median(walls):,.1f}, least {min(walls):,.1f}, most {max(walls):,.1f}")
    print(f"ms until the last launch: median {statistics.median(launched):,.1f}, most {max(launched):,.1f}")
    print(f"CPU seconds: median {statistics.median(cpus):.3f}")
    print(f"{flop / statistics.median(walls) / 1e9:.2f} TFLOP/s; peak memory {memory(device) - before:,.0f} MiB")
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        kinds = ("num_device_alloc", "num_device_free", "num_alloc_retries")
        print("calls of the allocator after warm-up:", {kind: stats[kind] - allocator[kind] for kind in kinds})
    print(f"last loss {losses[-1]:.5f}")
    if arguments.profile:
        profile_step(model, optimizer, batches[-1].to(device), device)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bundle", default="rq3")
    parser.add_argument("--set", action="append")
    parser.add_argument("--profile", action="store_true")
    for name, default in (("rows", 256), ("steps", 30), ("warm-up", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Runs a training step and returns its loss, for which it does not wait."""
    optimizer.zero_grad()
    losses = model.objective(model(batch), batch)
    loss = (losses.sums / losses.counts.clamp(min=1)).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def profile_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, device: torch.device
) -> None:
    """Prints where the time of a step goes, on the device and on the host."""
    wait(device)
    with profile() as profiler:
        step(model, optimizer, batch)
        wait(device)
    events = profiler.key_averages()
    busy = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    for column in (busy, "self_cpu_time_total")[: 1 + (device.type == "cuda")]:
        print(events.table(sort_by=column, row_limit=25, max_name_column_width=70))
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    waits = {event.key: event.count for event in events if "Synchronize" in event.key}
    print(f"{launches} launches; waits, of which the profiler and the end of the step add some: {waits}")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(device: torch.device, *, start: bool = False) -> float:
    """Returns the peak so far, MiB; with `start`, what is in use now, and forgets the peak."""
    if device.type == "cuda":
        if start:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**20
        return torch.cuda.max_memory_allocated() / 2**20
    if start:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
