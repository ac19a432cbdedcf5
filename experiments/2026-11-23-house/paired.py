"""Two checkouts of recsys on one GPU in turn: attention, the STU layer, and what a launch costs the host.

    python paired.py --before FOLDER --after FOLDER [--rounds 5] [--out FILE.json]

Each checkout has a process of its own, and both hold the inputs of the case at hand. A round times the case in
one process, then in the other, so that a hot GPU or a busy host meets both alike. A figure is the median over
rounds of the median over calls; `host` rows are microseconds of Python and launch for a call on a tiny batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

EQUAL = [(128, 1024, 128), (32, 4096, 128), (8, 16384, 128), (64, 4096, 64), (32, 2048, 256), (1024, 256, 64)]
NAMES = [
    *(f"B{batch} L{length} D{dim}" for batch, length, dim in EQUAL),
    "uniform 1..4096 D128",
    "Pareto 16..2048 D128",
    "L2048 D64 bias",
    "L16384 D128 window 512",
    "L4096 D128 deterministic",
    "STU layer L1024",
    "STU layer L4099",
    "host attention",
    "host STU layer",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True)
    parser.add_argument("--after", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--cases", nargs="+", default=NAMES)
    options = parser.parse_args()
    workers = [Worker(options.before), Worker(options.after)]
    rows = []
    print(f"{'case':28} {'pass':5} {'before':>9} {'after':>9}  after/before")
    for name in options.cases:
        for worker in workers:
            worker.ask({"prepare": name})
        directions = workers[0].answer()
        assert directions == workers[1].answer()
        for direction in directions:
            times = [[], []]
            for _ in range(options.rounds):
                for worker, found in zip(workers, times, strict=True):
                    worker.ask({"time": direction})
                    found.append(worker.answer())
            before, after = map(statistics.median, times)
            ratios = [b / a for a, b in zip(*times, strict=True)]
            rows.append({"case": name, "pass": direction, "before": before, "after": after, "ratios": ratios})
            spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
            print(f"{name:28} {direction:5} {before:9.4f} {after:9.4f}  {after / before:.3f}  ({spread})", flush=True)
    for worker in workers:
        worker.ask({"end": True})
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    return 0


class Worker:
    """A process that imports recsys from one checkout."""

    def __init__(self, root: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, os.path.abspath(__file__), "--worker"]
        self.process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: dict) -> None:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early")
        return json.loads(line)


def work() -> None:
    """Reads questions from standard input and answers on standard output, a JSON value a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not reach the answers
    calls = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "end" in question:
            return
        if "prepare" in question:
            calls.clear()
            calls.update(prepare(question["prepare"]))
            result = list(calls)
        else:
            result = calls[question["time"]]()
        answers.write(json.dumps(result) + "\n")
        answers.flush()


def prepare(name: str) -> dict:
    """The timed functions of a case, by the name of their pass; each has run once."""
    import torch

    torch.cuda.empty_cache()
    if "STU" in name:
        return prepare_layer(name)
    from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention

    mask, dim, heads = AttentionMask(), 64 if "D64" in name else 256 if "D256" in name else 128, 4
    if name.startswith("B") and " L" in name:
        batch, length = int(name[1 : name.index(" ")]), int(name.split(" L")[1].split()[0])
        lengths = torch.full((batch,), length)
    elif name.startswith("uniform"):
        lengths = torch.randint(1, 4097, (64,), generator=torch.Generator().manual_seed(46))
    elif name.startswith("Pareto"):
        draws = torch.rand(512, generator=torch.Generator().manual_seed(250))
        lengths = (16 / draws.pow(1 / 0.93)).clamp(max=2048).to(torch.int64)
    elif name.startswith("L16384"):
        lengths, mask = torch.full((8,), 16384), AttentionMask(window=512, prefix=64)
    elif name.startswith("host"):
        lengths = torch.full((4,), 64)
    else:
        lengths = torch.full((32,), int(name[1:5]))
    layout = SequenceLayout(lengths).to("cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    def tokens():
        shape = (layout.total_len, heads, dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    bias = None
    if "bias" in name:
        times = torch.randint(0, 10**6, (layout.total_len,), generator=torch.Generator().manual_seed(3))
        times = times.cumsum(0).cuda()
        tables = [torch.randn(heads, n, device="cuda").mul_(0.1).requires_grad_() for n in (2048, 128)]
        bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:]]))
    sets = [[tokens().requires_grad_() for _ in range(3)] for _ in range(2)]
    grad = tokens()
    options = {"scale_len": float(lengths.max()), "bias": bias, "deterministic": "deterministic" in name}

    def forward(i):
        return hstu_attention(*sets[i % 2], layout, mask, **options)

    leaves = list(tables) if bias is not None else []
    if name.startswith("host"):
        with torch.no_grad():
            forward(0)

        def both(i):
            torch.autograd.grad(forward(i), sets[i % 2], grad)

        def alone(i):
            with torch.no_grad():
                forward(i)

        alone(0), both(0)
        return {"fwd": lambda: host_us(alone), "f+b": lambda: host_us(both)}
    outs = [forward(i) for i in range(2)]

    def backward(i):
        torch.autograd.grad(outs[i % 2], [*sets[i % 2], *leaves], grad, retain_graph=True)

    backward(0)
    return {"fwd": lambda: device_ms(forward), "bwd": lambda: device_ms(backward)}


def prepare_layer(name: str) -> dict:
    import torch

    from recsys.ops import SequenceLayout
    from scripts import bench_stu

    host = name.startswith("host")
    length, batch = (64, 4) if host else (int(name.rpartition("L")[2]), 32)
    layer = bench_stu.layer_of(1024, 4, "cuda")
    layout = SequenceLayout(torch.full((batch,), length)).to("cuda")
    sets = [bench_stu.tokens(layout.total_len, 1024, "cuda", seed) for seed in range(2)]
    cotangent, leaves = torch.randn_like(sets[0]), list(layer.parameters())

    def step(i):
        x = sets[i % 2]
        out = bench_stu.forward(layer, x, layout, "sm90", True)
        torch.autograd.grad(out, [x, *leaves], cotangent)

    step(0)
    return {"f+b": (lambda: host_us(step)) if host else (lambda: device_ms(step, 10))}


def device_ms(call, repeats: int = 20) -> float:
    """Median of the device's time for a call, in milliseconds."""
    import torch

    call(0)
    events = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(repeats)]
    for i, (start, end) in enumerate(events):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def host_us(call, repeats: int = 200) -> float:
    """Microseconds that the host needs for a call, the device being faster; the best of five series."""
    import torch

    best = float("inf")
    for i in range(20):
        call(i)
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(repeats):
            call(i)
        best = min(best, (time.perf_counter() - start) / repeats)
        torch.cuda.synchronize()
    return best * 1e6


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work()
    else:
        sys.exit(main())
