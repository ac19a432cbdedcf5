#!/usr/bin/env python3
"""Measures the speed of one STU layer on a GPU: a training step of the layer, checked before it is timed.

    python scripts/bench_stu.py [--lengths 1024 2048 4099 8192] [--batch 32] [--record FILE]

The layer has width 1024, 4 heads of 256 and the gate u * norm(a). Tokens are bfloat16 and products run
under autocast, as in a model of that precision; all samples are equally long. First, output and gradients
of a small batch are checked: their error from float64 may be twice that of the reference backends in
bfloat16. Then forward and backward are timed with CUDA events (medians), with and without compiling the
front of the layer. Useful FLOP are three times those of the forward pass: 2 x rows x weights, and 4 x width
per visible pair. `--record` appends entries like those of `bench_ops.py` to a file, which is created if it
does not exist.

On a CPU, tiny shapes test the script itself. The exit code is 1 if the layer is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys.flags import Parser, positive  # noqa: E402
from recsys.modules.flops import attention_flops, linear_flops  # noqa: E402
from recsys.modules.stu import STUConfig, STULayer  # noqa: E402
from recsys.ops import AttentionMask, SequenceLayout, last_backend  # noqa: E402
from recsys.ops.hstu_attention import Problem  # noqa: E402
from recsys.ops.hstu_attention import attend as hstu_attend  # noqa: E402
from scripts import bench_records  # noqa: E402
from scripts.bench_ops import FACTOR, Record, median_ms, table  # noqa: E402

OP = "stu_layer"


def layer_of(width: int, heads: int, device: str) -> STULayer:
    """Builds an STU layer in training mode, without dropout."""
    torch.manual_seed(0)
    form = STUConfig(gate="ugn")
    layer = STULayer(width, num_heads=heads, qk_dim=width // heads, v_dim=width // heads, config=form)
    return layer.to(device)


def tokens(rows: int, width: int, device: str, seed: int) -> Tensor:
    """Makes tokens, bfloat16 [rows, width], a leaf with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator).to(device, torch.bfloat16).requires_grad_()


def forward(layer: STULayer, x: Tensor, layout: SequenceLayout, backend: str, bf16: bool) -> Tensor:
    """Returns the layer's output, with attention by the given backend."""
    alpha = (layer.widths[2] // layer.num_heads) ** -0.5
    problem = Problem(layout, AttentionMask(), alpha, float(layout.max_len))
    attend = partial(hstu_attend, problem=problem, backend=backend)
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=bf16):
        return layer(x, attend)


def results(layer: STULayer, x: Tensor, layout: SequenceLayout, backend: str, bf16: bool) -> list[Tensor]:
    """Returns output and all gradients in float64."""
    out = forward(layer, x, layout, backend, bf16)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    gradients = torch.autograd.grad(out, [x, *layer.parameters()], cotangent)
    return [tensor.detach().double() for tensor in (out, *gradients)]


def widest_error(width: int, heads: int, device: str, backend: str) -> float:
    """Returns the largest error of a tensor relative to the allowed one; above 1 is wrong."""
    layer, layout = layer_of(width, heads, device), SequenceLayout(torch.tensor([300, 1, 77])).to(device)
    x = tokens(layout.total_len, width, device, seed=1)
    ours, theirs = (results(layer, x, layout, name, bf16=True) for name in (backend, "reference"))
    right = results(layer.double(), x.detach().double().requires_grad_(), layout, "reference", bf16=False)
    worst = 0.0
    for got, reference, exact in zip(ours, theirs, right, strict=True):
        norm = exact.norm().clamp(min=1e-12)
        allowed = FACTOR * (reference - exact).norm() / norm + 1e-3
        error = float((got - exact).norm() / norm / allowed)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def bench(
    batch: int, length: int, width: int, heads: int, backend: str, commit: str, compiled: bool
) -> Record:
    """Times a training step of the layer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, layout = layer_of(width, heads, device), SequenceLayout(torch.full((batch,), length)).to(device)
    layer.compiled = compiled
    sets = [tokens(layout.total_len, width, device, seed) for seed in range(2)]
    cotangent = torch.randn_like(sets[0])
    leaves = list(layer.parameters())

    def step(i: int) -> None:
        x = sets[i % 2]
        torch.autograd.grad(forward(layer, x, layout, backend, bf16=True), [x, *leaves], cotangent)

    flop = 3 * (linear_flops(layer, layout.total_len) + attention_flops(AttentionMask(), layout, 2 * width))
    step(0)
    before = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ms = median_ms(step, device, repeats=10)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else None
    shape = f"B{batch} L{length} E{width} H{heads}{' compiled' if compiled else ''}"
    if (ran := last_backend("hstu_attention")) != backend:
        raise RuntimeError(f"{backend} was asked for, {ran} ran")
    return Record(OP, backend, shape, "fwd+bwd", ms, flop / ms / 1e9, peak, True, commit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks the layer, then times it."""
    on_gpu = torch.cuda.is_available()
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sizes = (32, 1024, 4, [1024, 2048, 4099, 8192]) if on_gpu else (2, 16, 2, [9])
    parser.add_argument("--batch", type=positive, default=sizes[0], help="number of samples")
    parser.add_argument("--width", type=positive, default=sizes[1], help="width of a token")
    parser.add_argument("--heads", type=positive, default=sizes[2])
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=sizes[3], help="number of tokens of a sample"
    )
    parser.add_argument("--backend", help="attention backend; default: sm90 on CUDA, else reference")
    parser.add_argument("--record", type=Path, help="file to which records are appended")
    parser.add_argument("--commit", help="commit to record, for machines without git")
    options = parser.parse_args(arguments)
    device = "cuda" if on_gpu else "cpu"
    backend = options.backend or ("sm90" if on_gpu else "reference")
    error = widest_error(options.width, options.heads, device, backend)
    if not error <= 1:
        print(f"the layer is wrong: {error:.2f} times the allowed error", file=sys.stderr)
        return 1
    commit = options.commit or bench_records.current_commit()
    records = [
        bench(options.batch, length, options.width, options.heads, backend, commit, compiled)
        for length in options.lengths
        for compiled in (False, True)
    ]
    print(table(records))
    bench_records.write(options.record, records, grow=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
