#!/usr/bin/env python3
"""Measures speed and memory of `linear_logp` on a GPU; each case is checked before it is timed.

    python scripts/bench_logp.py [--backend triton] [--rows 8192] [--case NAME ...] [--record FILE]

A case is the loss over a catalogue, forward and backward, in bfloat16, with all gradients and random
upstream gradients for both outputs. `--peers` adds two forms in PyTorch. Chunked: `cross_entropy` over as
many rows at a time as make 2^28 scores, under `checkpoint`. Held, if memory allows: `cross_entropy` of all
scores at once in bfloat16, with as few passes as possible.

1024 rows are compared with all candidates in float64. The error of a case may be twice that of PyTorch in
bfloat16, also in the gradients of the candidates that are not the target of any row. Memory is the peak
allocation beyond inputs and gradients. Useful FLOP are 6 N V D: two products backward, one forward.
`--record` writes a list of `{op, backend, shape, pass, ms, tflops, extra_mb, ok, commit}`. On a CPU, a tiny
shape tests the script itself. The exit code is 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys.ops import last_backend, linear_logp  # noqa: E402
from scripts import bench_records  # noqa: E402
from scripts.bench_ops import FACTOR, median_ms  # noqa: E402

CHUNK_SCORES = 1 << 28
"""Number of scores that chunked PyTorch holds at once: 512 MiB in bfloat16."""

HELD_SCORES = 1 << 31
"""Limit for holding all scores at once: 4 GiB in bfloat16, several times over."""

CHECKED_ROWS = 1024
"""At most this many rows of a case are compared with float64 scores of all candidates."""

COMPARED_NUMBERS = 1 << 26
"""Entries of two matrices that are compared at a time."""

FEW = 1 << 17
"""Up to this many candidates, several sets of inputs alternate, since one set might stay in a cache."""

TEMPERATURE = 0.05


class Case(NamedTuple):
    """One shape."""

    rows: int
    candidates: int
    width: int

    @property
    def shape(self) -> str:
        return f"N{self.rows} V{self.candidates} D{self.width}"

    @property
    def flop(self) -> float:
        return 6.0 * self.rows * self.candidates * self.width


@dataclass(frozen=True)
class Record:
    """One entry of the record."""

    op: str
    backend: str
    shape: str
    direction: str  # "pass" in the file, which is a keyword of Python
    ms: float | None
    tflops: float | None
    extra_mb: float | None
    ok: bool
    commit: str


def cases(rows: int) -> list[Case]:
    """Return catalogues of 16 thousand, 131 thousand, one million and four million items."""
    sizes = (1 << 14, 1 << 17, 1 << 20, 1 << 22)
    return [Case(rows, candidates, width) for candidates in sizes for width in (64, 128, 256, 512)]


class Inputs(NamedTuple):
    """Unit vectors, as retrieval has them."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    cotangents: list[Tensor]

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Make leaves with gradients; half of the rows are near their target."""
    generator = torch.Generator(device).manual_seed(seed)

    def unit(rows: int) -> Tensor:
        return F.normalize(torch.randn(rows, case.width, generator=generator, device=device), dim=1)

    weight, hidden = unit(case.candidates), unit(case.rows)
    target = torch.randint(case.candidates, (case.rows,), generator=generator, device=device)
    hidden[::2] = F.normalize(weight[target[::2]] + 0.5 * hidden[::2], dim=1)
    cotangents = [torch.randn(case.rows, generator=generator, device=device) for _ in range(2)]
    hidden, weight = (tensor.bfloat16().requires_grad_() for tensor in (hidden, weight))
    return Inputs(hidden, weight, target, cotangents)


def by_op(inputs: Inputs, backend: str) -> list[Tensor]:
    """Return logp and lse of the op."""
    hidden, weight, target, _ = inputs
    return list(linear_logp(hidden, weight, target, temperature=TEMPERATURE, backend=backend))


def by_scores(inputs: Inputs) -> list[Tensor]:
    """Return logp and lse from stored scores in the type of the inputs."""
    scores = inputs.hidden @ inputs.weight.T / TEMPERATURE
    lse = torch.logsumexp(scores, 1)
    return [scores.gather(1, inputs.target[:, None])[:, 0] - lse, lse]


def by_chunks(inputs: Inputs) -> list[Tensor]:
    """Return logp only, in the usual chunked form of PyTorch."""
    hidden, weight, target, _ = inputs

    def loss(rows: Tensor, wanted: Tensor) -> Tensor:
        return -F.cross_entropy((rows @ weight.T).float() / TEMPERATURE, wanted, reduction="none")

    size = max(1, CHUNK_SCORES // weight.shape[0])
    pairs = zip(hidden.split(size), target.split(size), strict=True)
    return [torch.cat([checkpoint(loss, *pair, use_reentrant=False) for pair in pairs])]


def by_held(inputs: Inputs) -> list[Tensor]:
    """Return logp only, with the temperature applied to `hidden`, which saves a pass over the scores."""
    scores = (inputs.hidden * (1 / TEMPERATURE)) @ inputs.weight.T
    return [-F.cross_entropy(scores, inputs.target, reduction="none")]


def with_gradients(inputs: Inputs, outs: list[Tensor]) -> list[Tensor]:
    given = [cotangent.to(out.dtype) for cotangent, out in zip(inputs.cotangents, outs, strict=False)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, inputs.leaves, given)]


def from_scores(inputs: Inputs) -> list[Tensor]:
    """Return outputs and gradients of `by_scores`, computed a few rows at a time."""
    size, weight = max(1, CHUNK_SCORES // inputs.weight.shape[0]), inputs.weight
    of_rows = (inputs.hidden.detach(), inputs.target, *inputs.cotangents)
    kept, of_weight = [], torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    for hidden, target, *cotangents in zip(*(tensor.split(size) for tensor in of_rows), strict=True):
        part = Inputs(hidden.requires_grad_(), weight, target, cotangents)
        *rows, share = with_gradients(part, by_scores(part))
        kept.append(rows)
        of_weight += share
    return [*(torch.cat(parts) for parts in zip(*kept, strict=True)), of_weight]


def sizes(matrix: Tensor, chosen: Tensor, less: Tensor | None = None) -> Tensor:
    """Return norm and largest number, float64, of the `chosen` [n] rows of `matrix - less` [n, ...]."""
    less = matrix.new_zeros(1).expand(matrix.shape) if less is None else less
    squares = largest = torch.zeros((), dtype=torch.float64, device=matrix.device)
    rows = max(1, COMPARED_NUMBERS // max(1, matrix[:1].numel()))
    for block, other_block, which in zip(
        matrix.split(rows), less.split(rows), chosen.split(rows), strict=True
    ):
        if which.any():
            apart = block[which].double() - other_block[which].double()
            squares, largest = squares + apart.square().sum(), torch.maximum(largest, apart.abs().max())
    return torch.stack([squares.sqrt(), largest])


def widest_error(case: Case, device: str, backend: str) -> float:
    """Return the largest error of an output or gradient relative to the allowed one; above 1 is wrong."""
    inputs = make_inputs(case._replace(rows=min(case.rows, CHECKED_ROWS)), device, seed=1)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs.leaves]
    exact = Inputs(wide[0], wide[1], inputs.target, [cotangent.double() for cotangent in inputs.cotangents])
    ours = with_gradients(inputs, by_op(inputs, backend))
    if backend not in ("auto", last_backend("linear_logp")):
        raise RuntimeError(f"{backend} was asked for, {last_backend('linear_logp')} ran")
    theirs, want = from_scores(inputs), from_scores(exact)
    all_rows = torch.ones(inputs.hidden.shape[0], dtype=torch.bool, device=device)
    is_target = torch.zeros(case.candidates, dtype=torch.bool, device=device)
    is_target[inputs.target] = True
    worst = 0.0
    for place, chosen in ((0, all_rows), (1, all_rows), (2, all_rows), (3, is_target), (3, ~is_target)):
        got, reference, right = ours[place], theirs[place], want[place]
        allowed = FACTOR * sizes(reference, chosen, right) + 1e-3 * sizes(right, chosen)
        error = (sizes(got, chosen, right) / allowed.clamp(min=1e-30)).max()
        worst = max(worst, float(error) if bool(error.isfinite()) else float("inf"))
    return worst


def measure(
    case: Case, run: Callable[[Inputs], list[Tensor]], device: str, repeats: int, warm: int = 3
) -> list[float]:
    """Return ms of forward, ms of forward and backward, and MiB beyond inputs and gradients."""
    inputs = [make_inputs(case, device, seed) for seed in range(2, 5 if case.candidates <= FEW else 3)]

    def forward(i: int) -> None:
        with torch.no_grad():
            run(inputs[i % len(inputs)])

    def both(i: int) -> None:
        given = inputs[i % len(inputs)]
        outs = run(given)
        torch.autograd.grad(outs, given.leaves, given.cotangents[: len(outs)])

    of_forward = median_ms(forward, device, repeats, warm)
    if device != "cuda":
        return [of_forward, median_ms(both, device, repeats, warm), float("nan")]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    of_both = median_ms(both, device, repeats, warm)
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in inputs[0].leaves)
    return [of_forward, of_both, (torch.cuda.max_memory_allocated() - before - gradients) / 2**20]


def bench(
    case: Case, device: str, backend: str, commit: str, repeats: int, *, peers: bool = True
) -> list[Record]:
    """Return records of the backend and of PyTorch, without times if the case is wrong."""
    try:
        error = widest_error(case, device, backend)
    except (RuntimeError, ValueError) as failure:
        print(f"{case.shape}: {type(failure).__name__}: {failure}", file=sys.stderr)
        error = float("inf")
    if not error <= 1:
        print(f"{case.shape}: {error:.2f} times the allowed error", file=sys.stderr)
        return [Record("linear_logp", backend, case.shape, "fwd+bwd", None, None, None, False, commit)]
    records = []
    name = last_backend("linear_logp") or backend
    ways = [(name, lambda inputs: by_op(inputs, backend), (repeats, 3))]
    if peers:
        ways.append(("chunked PyTorch", by_chunks, (1 if case.candidates > 1 << 20 else 2, 1)))
        if case.rows * case.candidates <= HELD_SCORES:
            ways.append(("held scores", by_held, (repeats, 3)))
    for name, run, times in ways:
        if device == "cuda":
            torch.cuda.empty_cache()
        forward, both, extra = measure(case, run, device, *times)
        for direction, ms, flop in (("fwd", forward, case.flop / 3), ("fwd+bwd", both, case.flop)):
            memory = extra if direction == "fwd+bwd" and extra == extra else None
            tflops = flop / ms / 1e9
            records.append(
                Record("linear_logp", name, case.shape, direction, ms, tflops, memory, True, commit)
            )
    return records


def table(records: Sequence[Record]) -> str:
    """Format one line per record."""
    lines = []
    for record in records:
        numbers = "".join(
            f"{'-' if value is None else format(value, f'.{digits}f'):>10}"
            for value, digits in ((record.ms, 3), (record.tflops, 0), (record.extra_mb, 0))
        )
        ok = "" if record.ok else "  WRONG"
        lines.append(f"{record.shape:<24} {record.backend:<16} {record.direction:<8}{numbers}{ok}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measures speed and memory of linear_logp, after checking its results."
    )
    parser.add_argument("--backend", default="auto" if torch.cuda.is_available() else "reference")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--case", action="append", help="only shapes that contain this; may be repeated")
    parser.add_argument("--record", type=Path, help="where to write the list of records")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", help="commit to record, for machines without git")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = cases(options.rows) if device == "cuda" else [Case(40, 300, 16)]
    if options.case:
        chosen = [case for case in chosen if any(name in case.shape for name in options.case)]
    print(f"{'shape':<24} {'backend':<16} {'pass':<8}{'ms':>10}{'TFLOP/s':>10}{'extra MB':>10}")
    records: list[Record] = []
    for case in chosen:
        commit = options.commit or bench_records.current_commit()
        made = bench(case, device, options.backend, commit, options.repeats, peers=options.peers)
        print(table(made), flush=True)
        records += made
        bench_records.write(options.record, records)  # after each case: a time limit may end this process
    return 0 if all(record.ok for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
