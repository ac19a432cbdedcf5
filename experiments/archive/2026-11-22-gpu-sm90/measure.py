#!/usr/bin/env python3
"""Where the time of a call of attention goes: on the GPU kernel by kernel, on the host function by function.

python experiments/archive/2026-11-22-gpu-sm90/measure.py [--backend sm90] [--case NAME ...] [--host] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from scripts.bench_cases import cases, useful_flop
from scripts.bench_ops import attend, make_inputs

CALLS = 200


def kernels(case, backend: str) -> None:
    """Medians of each kernel's time, forward and backward, over three sets of inputs."""
    layout = case.layout().to("cuda")
    sets = [make_inputs(case, layout, seed) for seed in range(3)]

    def both(i: int) -> None:
        inputs = sets[i % 3]
        out = attend(case, inputs, layout, backend)
        torch.autograd.grad(out, inputs.leaves, inputs.cotangent)

    for i in range(4):
        both(i)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(12):
            both(i)
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]].append(event.device_time)
    flop = useful_flop(case)
    print(f"{case.shape}: {flop / 1e9:.1f} GFLOP forward", flush=True)
    for name, found in sorted(times.items(), key=lambda item: -sum(item[1])):
        if len(found) >= 12:
            print(f"   {sorted(found)[len(found) // 2]:9.1f} us x{len(found) // 12}  {name}", flush=True)


def host(case, backend: str, profiled: bool) -> None:
    """Host time a call without waiting for the device, forward alone and backward alone."""
    layout = case.layout().to("cuda")
    inputs = make_inputs(case, layout, 0)
    outs = []

    def forward() -> None:
        for _ in range(CALLS):
            outs.append(attend(case, inputs, layout, backend))

    def backward() -> None:
        for out in outs:
            torch.autograd.grad(out, inputs.leaves, inputs.cotangent)

    def nothing() -> None:
        for _ in range(CALLS):
            torch.autograd.grad(inputs.q.view_as(inputs.q), [inputs.q], inputs.cotangent)

    for name, run in (("forward", forward), ("backward", backward), ("a backward of a view", nothing)):
        found = []
        for _ in range(3):
            if name == "forward":
                outs.clear()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            found.append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
            if name == "backward":
                outs.clear()
                forward()
        print(f"   host {name}: {' '.join(f'{one:.1f}' for one in found)} us a call", flush=True)
    if not profiled:
        return
    for name, run in (("forward", forward), ("backward", backward)):
        outs.clear()
        if name == "backward":
            forward()
            torch.autograd.set_multithreading_enabled(False)
        torch.cuda.synchronize()
        profile = cProfile.Profile()
        profile.enable()
        run()
        profile.disable()
        torch.cuda.synchronize()
        print(f"--- {name}")
        pstats.Stats(profile, stream=sys.stdout).strip_dirs().sort_stats("tottime").print_stats(28)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="sm90")
    parser.add_argument("--case", action="append")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for case in cases():
        if case.deterministic or case.num_cached is not None:
            continue
        if options.case and not any(name in case.shape for name in options.case):
            continue
        if options.host:
            case = replace(
                case, lengths=case.lengths[:4].clamp(max=128)
            )  # less for the GPU than for the host
            print(f"{case.shape}, four samples of it")
            host(case, options.backend, options.profile)
        else:
            kernels(case, options.backend)


if __name__ == "__main__":
    main()
