"""Do packages run the Hopper forward of attention, are they right, and how fast are they?

    python experiments/2026-11-28-hopper-package/trial.py --output FOLDER [--only NAME ...]

Each case is exported by a process of its own, all at the same time; FOLDER has their logs, with tracebacks.
Then processes load the packages, one after the other, compare them with the model in eager mode, and time
them: rows per second on batches that are on the GPU, each call in a row with others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import recsys.config as config
from recsys import environment
from recsys import protos as pb
from recsys.inference.compiler import compile_graph
from recsys.inference.program import Program
from recsys.models.signature import TensorSpec
from recsys.ops import AttentionMask, SequenceLayout, hstu_attention, offsets_from_lengths
from recsys.scoring.signature import SHORTEST, ScoringGraph, inputs_of, scoring_signature, steps
from scripts.serving_ways import Scoring
from scripts.step_variants import Shape, variant_of

KERNEL = "packaged_forward_kernel"
BASE = Path(__file__).resolve().parents[2] / "scripts" / "bench_step.config"
CUDA = torch.device("cuda")


class Case(NamedTuple):
    """A model and the kernel that its package is meant to run."""

    layers: int
    width: int
    heads: int
    history: int
    candidates: int
    rows: int
    backend: str = "auto"
    bias: str = ""
    hopper: bool = True

    def pipeline(self) -> pb.Pipeline:
        stack = f"num_layers: {self.layers} num_heads: {self.heads} qk_dim: {self.width // self.heads} {self.bias}"
        overrides = [f"model.embedding_dim={self.width}", f"model.ranker.mixer.hstu={{{stack}}}"]
        shape = Shape(self.history, self.rows, self.candidates, 256, 64, 1024, None, self.backend)
        return variant_of(config.load(BASE, overrides), "full", shape)


OPS = {
    f"op {dim} {name}": (dim, mask, contextual)
    for dim, name, mask, contextual in (
        (128, "causal", AttentionMask(), 1),
        (64, "window", AttentionMask(window=100, prefix=10), 3),
        (256, "groups", AttentionMask(130, 70, True, 5), 0),
    )
}
"""Cases of the op alone: width of a head, mask, contextual tokens."""

LARGE = Case(8, 1024, 8, 2048, 256, 8)
CASES = {
    "small": Case(2, 256, 2, 300, 20, 5),
    "large": LARGE,
    "large triton": LARGE._replace(backend="triton", hopper=False),
    "large bias": LARGE._replace(bias="bias {}", hopper=False),
}


class Attend(torch.nn.Module):
    """Two calls of attention on parts of one product, as layers make them."""

    def __init__(self, dim: int, mask: AttentionMask, contextual: int, heads: int = 2):
        super().__init__()
        self.dim, self.mask, self.contextual, self.heads = dim, mask, contextual, heads
        self.weight = torch.nn.Parameter(torch.randn(heads * dim, 3 * heads * dim) * (heads * dim) ** -0.5)

    def forward(self, *tensors: Tensor) -> Tensor:
        x, lengths, num_targets, carrier = tensors
        offsets, longest = offsets_from_lengths(lengths), carrier.shape[0] + SHORTEST
        layout = SequenceLayout.trusted(
            lengths, offsets, num_targets, self.contextual, x.shape[0], longest, x.shape[0]
        )
        for _ in range(2):
            parts = torch.nn.functional.silu(x @ self.weight).split(self.heads * self.dim, dim=1)
            q, k, v = (part.view(-1, self.heads, self.dim) for part in parts)
            x = x + hstu_attention(q, k, v, layout, self.mask, scale_len=100.0).flatten(1)
        return x


def op_of(name: str) -> tuple[Attend, list[TensorSpec], list[tuple[Tensor, ...]]]:
    """Returns the module, its specs and batches: one to capture with, then other sizes."""
    dim, mask, contextual = OPS[name]
    torch.manual_seed(0)
    module = Attend(dim, mask, contextual).to(CUDA, torch.bfloat16).eval()
    specs = [
        TensorSpec("x", torch.bfloat16, ("tokens", str(2 * dim))),
        TensorSpec("lengths", torch.int64, ("rows",)),
        TensorSpec("num_targets", torch.int64, ("rows",)),
        TensorSpec("steps", torch.int64, ("longest",)),
    ]
    batches = []
    for sizes in (
        [(150, 3), (20, 5), (260, 0)],
        [(0, 2)],
        [(900, 40), (0, 0), (1, 140)] * 20,
        [(0, 0), (1, 0)],
    ):
        uih, targets = (torch.tensor(column, device=CUDA) for column in zip(*sizes, strict=True))
        lengths = uih + targets + contextual
        x = torch.randn(int(lengths.sum()), 2 * dim, device=CUDA, dtype=torch.bfloat16)
        batches.append((x, lengths, targets, steps(int(lengths.max()), CUDA)))
    return module, specs, batches


def export(name: str, path: Path) -> None:
    """Exports one case, in a process of its own."""
    start = time.perf_counter()
    if name in OPS:
        module, specs, batches = op_of(name)
        compile_graph(module, specs, batches[0], path, pb.Pipeline())
    else:
        pipeline = CASES[name].pipeline()
        scoring = Scoring(pipeline, CASES[name].candidates, CUDA)
        graph, inputs = ScoringGraph(scoring.model), inputs_of(scoring.batch, pipeline)
        compile_graph(graph, scoring_signature(pipeline), inputs, path, pipeline)
    print(f"exported in {time.perf_counter() - start:.0f} s")


def kernels_of(call: Callable[[], object]) -> set[str]:
    """Returns the names of the kernels of attention that a call runs."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:
        return {f"no profiler: {error}"}
    names = {event.key for event in profile.key_averages()}
    return {name for name in names if "forward_kernel" in name or "stand_in" in name}


def difference(got: Tensor, want: Tensor) -> float:
    """Returns the largest |got - want| / max(1, |want|); infinite if a number is missing."""
    far = (
        ((got.float() - want.float()).abs() / want.float().abs().clamp(min=1)).max()
        if want.numel()
        else torch.zeros(())
    )
    return float(far) if torch.isfinite(far) else float("inf")


def milliseconds(call: Callable[[], object], repeats: int = 12, count: int = 5) -> float:
    """Returns the median time of a call, in milliseconds, of several in a row."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / count)
    return statistics.median(times[2:])


@torch.no_grad()
def measure(name: str, path: Path) -> str:
    """Loads the package of a case and returns a line of the table."""
    if name in OPS:
        module, specs, batches = op_of(name)
        program = Program(path, specs, CUDA)
        worst = max(difference(program(batch)[0], module(*batch)) for batch in batches)
        again = max(difference(program(batch)[0], module(*batch)) for batch in reversed(batches * 3))
        used = kernels_of(lambda: program(batches[2]))
        return line(name, used, True, max(worst, again), "", "")
    case = CASES[name]
    pipeline = case.pipeline()
    scoring = Scoring(pipeline, case.candidates, CUDA)
    program = Program(path, scoring_signature(pipeline), CUDA)
    inputs = inputs_of(scoring.batch, pipeline)
    far = difference(program(inputs)[0], scoring.one_pass())
    used = kernels_of(lambda: program(inputs))
    speeds = [1e3 * case.rows / milliseconds(call) for call in (lambda: program(inputs), scoring.one_pass)]
    return line(name, used, case.hopper, far, *(f"{speed:,.1f}" for speed in speeds))


def line(name: str, used: set[str], hopper: bool, far: float, package: str, eager: str) -> str:
    is_right = (KERNEL in used) == hopper and far <= 5e-2
    shown = ", ".join(sorted(used)) or "none"
    return f"| {name} | {shown} | {far:.1e} | {package} | {eager} | {'' if is_right else 'WRONG'} |"


def start(step: str, name: str, folder: Path) -> subprocess.Popen:
    """Starts a step of a case in a process of its own: an error on the GPU ends all work of its process."""
    stem = name.replace(" ", "_")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"cache_{stem}")}
    command = [sys.executable, __file__, "--output", str(folder), "--only", name, "--step", step]
    with (folder / f"{stem}.{step}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | caches)


def finish(step: str, name: str, process: subprocess.Popen, folder: Path) -> list[str]:
    """Waits for a step, prints what it says at the end, and returns its line of the table, if there is one."""
    code = process.wait()
    said = (folder / f"{name.replace(' ', '_')}.{step}.log").read_text().strip().splitlines() or [""]
    warnings = [text for text in said if "is not used" in text]
    print("\n    ".join([f"{name}: {step} ends with {code}: {said[-1][:300]}", *warnings]), flush=True)
    return [said[-1]] if code == 0 and said[-1].startswith("| ") else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=[*OPS, *CASES])
    parser.add_argument("--step", choices=["export", "measure"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, names = options.output, options.only or [*OPS, *CASES]
    if options.step:
        environment.import_torchrec_quietly()
        path = folder / f"{names[0].replace(' ', '_')}.pt2"
        if options.step == "export":
            export(names[0], path)
        if options.step == "measure" or names[0] in OPS:  # of ops nothing is timed
            print(measure(names[0], path))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    table = [
        "| case | kernels of attention | difference | package rows/s | eager rows/s | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    exports = {name: start("export", name, folder) for name in names}
    for name, process in exports.items():
        table += finish("export", name, process, folder)
    for name, process in exports.items():
        if name in CASES and process.returncode == 0:
            table += finish("measure", name, start("measure", name, folder), folder)
    print("\n".join(table))
    return 0 if len(table) == 2 + len(names) and not any("WRONG" in row for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
