"""The loss of a retriever as training calls it, through autograd, from float32 vectors that are not
normalised: time, and the error of its gradients against float64.

    python experiments/2026-11-22-gpu-logp/training_sizes.py [--shape ROWS CANDIDATES WIDTH] ...
                                                             [--way NAME ...] [--lean]

Shapes are by default those of ml_1m, batches of 512 histories, some 80,000 queries over 3,883 items; and a
large catalogue, for the ways with little memory. Casts and what normalises are part of the time. --lean:
Triton with the tiles of calls without ids and norms. A line has ms of forward, of both, MiB beyond the
inputs, and errors relative to the norm: of logp and the gradients of hidden, weight and temperature.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import environment

environment.prefer_packaged_ptxas()
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from recsys.ops import linear_logp  # noqa: E402
from recsys.ops.linear_logp import triton_ops  # noqa: E402
from scripts.bench_ops import median_ms  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURE = 0.05
SHAPES = [(80_000, 3_883, 50), (80_000, 3_883, 128), (8_192, 1 << 20, 128)]


def by_op(hidden, weight, target, temperature, *, backend, dtype, pad=0, outside=False):
    """logp. `outside`: normalised before, by PyTorch."""
    if outside:
        hidden, weight = (F.normalize(rows, dim=1) for rows in (hidden, weight))
    hidden, weight = (F.pad(rows, (0, pad)) if pad else rows for rows in (hidden.to(dtype), weight.to(dtype)))
    given = {"temperature": temperature, "l2_normalize": not outside, "ignore_index": -1, "backend": backend}
    return linear_logp(hidden, weight, target, **given).logp


def ways(width: int, candidates: int) -> dict[str, dict]:
    """By name: arguments of `by_op`; the first two are float32."""
    half, full = torch.bfloat16, torch.float32
    pad = -width % 64 if width < 64 else 0
    found = {}
    if candidates < 100_000:
        found["reference float32"] = {"backend": "reference", "dtype": full}
        found["triton float32"] = {"backend": "triton", "dtype": full}
        found["reference bfloat16"] = {"backend": "reference", "dtype": half}
    found["triton bfloat16"] = {"backend": "triton", "dtype": half}
    if pad:
        found["triton bfloat16 padded 6"] = {"backend": "triton", "dtype": half, "pad": 6}
        found["triton bfloat16 padded"] = {"backend": "triton", "dtype": half, "pad": pad}
    found["triton bfloat16 outside"] = {"backend": "triton", "dtype": half, "pad": pad, "outside": True}
    found["sm90 bfloat16"] = {"backend": "sm90", "dtype": half}
    return found


def problem(rows: int, candidates: int, width: int):
    """Vectors of other lengths than one, half of the queries near their target, some without."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(count):
        return torch.randn(count, width, generator=generator, device=DEVICE)

    weight, hidden = 0.3 * normal(candidates), normal(rows)
    target = torch.randint(candidates, (rows,), generator=generator, device=DEVICE)
    hidden[::2] = 5 * weight[target[::2]] + 0.7 * hidden[::2]
    target[::160] = -1
    temperature = torch.tensor([TEMPERATURE], device=DEVICE)
    cotangent = torch.randn(rows, generator=generator, device=DEVICE).abs() / rows
    return [hidden, weight, temperature], target, cotangent


def gradients(leaves, target, cotangent, **way):
    """logp and gradients of hidden, weight, temperature."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    logp = by_op(leaves[0], leaves[1], target, leaves[2], **way)
    return [logp.detach(), *torch.autograd.grad(logp, leaves, cotangent.to(logp.dtype))]


def exact(leaves, target, cotangent):
    """The same in float64, a few rows at a time."""
    hidden, weight, temperature = (leaf.double().requires_grad_() for leaf in leaves)
    sums = [torch.zeros_like(weight), torch.zeros_like(temperature)]
    kept = []
    for some, wanted, given in zip(
        hidden.split(8000), target.split(8000), cotangent.split(8000), strict=True
    ):
        some = some.detach().requires_grad_()
        scores = F.normalize(some, dim=1) @ F.normalize(weight, dim=1).T / temperature
        logp = -F.cross_entropy(scores, wanted, reduction="none", ignore_index=-1)
        found = torch.autograd.grad(logp, (some, weight, temperature), given.double())
        kept.append((logp.detach(), found[0]))
        sums = [one + more for one, more in zip(sums, found[1:], strict=True)]
    return [*(torch.cat(parts) for parts in zip(*kept, strict=True)), *sums]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=int, nargs=3, action="append")
    parser.add_argument("--way", action="append")
    parser.add_argument("--lean", action="store_true")
    options = parser.parse_args()
    if options.lean:
        found = triton_ops.blocks_of
        triton_ops.blocks_of = lambda operands, table: found(operands._replace(hidden_norms=None), table)
    for rows, candidates, width in options.shape or SHAPES:
        leaves, target, cotangent = problem(rows, candidates, width)
        want = exact(leaves, target, cotangent) if candidates < 100_000 else None
        grown = [leaf.requires_grad_() for leaf in leaves]
        for name, way in ways(width, candidates).items():
            if options.way and not any(part in name for part in options.way):
                continue
            for precision in ("highest", "high") if "float32" in name else ("highest",):
                torch.set_float32_matmul_precision(precision)
                show(
                    f"N{rows} V{candidates} D{width} {name} {precision}", grown, target, cotangent, way, want
                )


def show(name, leaves, target, cotangent, way, want) -> None:
    """Prints a line."""
    hidden, weight, temperature = leaves
    fixed = temperature.detach()

    def forward(_):
        with torch.no_grad():
            by_op(hidden, weight, target, fixed, **way)

    def both(_):
        logp = by_op(hidden, weight, target, fixed, **way)
        torch.autograd.grad(logp, (hidden, weight), cotangent)

    numbers = ""
    if want is not None:
        got = gradients(leaves, target, cotangent, **way)
        errors = [float((one - two).norm() / two.norm()) for one, two in zip(got, want, strict=True)]
        numbers = " ".join(f"{error:.1e}" for error in errors)
    of_forward = median_ms(forward, DEVICE, 7)
    before = torch.cuda.memory_allocated()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    of_both = median_ms(both, DEVICE, 7)
    extra = (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"{name:<58}{of_forward:8.3f}{of_both:9.3f} ms {extra:7.0f} MiB  {numbers}", flush=True)


if __name__ == "__main__":
    main()
