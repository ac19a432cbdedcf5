"""ms of the passes of `linear_logp`, backend by backend, without the host's share of a call.

    python experiments/2026-11-22-gpu-logp/kernels.py [--shape D V] ... [--rows 8192] [--backend sm90]
    python experiments/2026-11-22-gpu-logp/kernels.py --float32     # as the ml_1m configs call it

A pass is what a call of the op does, from outputs or gradients that are there: forward; backward to hidden
alone, to the weight alone, to both. The gradients of narrow rows are Triton's in both backends. With
--float32 the reference stands beside Triton. Right numbers are the business of
tests/ops/linear_logp/test_linear_logp_gpu.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import environment

environment.prefer_packaged_ptxas()
import torch  # noqa: E402
from torch.nn.functional import normalize  # noqa: E402

from recsys.ops.linear_logp import reference, sm90_ops, triton_ops  # noqa: E402
from recsys.ops.linear_logp.recompute import Operands, Upstream, Wanted  # noqa: E402
from scripts.bench_ops import median_ms  # noqa: E402

DEVICE = "cuda"
BACKENDS = {"sm90": sm90_ops, "triton": triton_ops}
SHAPES = [(d, 1 << 14) for d in (64, 128, 256, 512)] + [(d, 1 << 17) for d in (64, 128, 256, 512)]
SHAPES += [(d, 1 << 20) for d in (64, 128, 512)]
WANTED = {"hidden": (True, False), "weight": (False, True), "both": (True, True)}


def operands(rows: int, candidates: int, width: int, dtype: torch.dtype) -> Operands:
    """Unit vectors at temperature 0.05."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def unit(count: int) -> torch.Tensor:
        return normalize(torch.randn(count, width, generator=generator, device=DEVICE), dim=1).to(dtype)

    target = torch.randint(candidates, (rows,), generator=generator, device=DEVICE)
    scale = torch.full((1,), 20.0, device=DEVICE)
    return Operands(unit(rows), unit(candidates), None, scale, target, None, None)


def passes(name: str, rows: int, width: int, candidates: int) -> None:
    """Prints a line each."""
    ops, given = BACKENDS[name], operands(rows, candidates, width, torch.bfloat16)
    found = ops.whole_forward(given, -100)
    upstream = torch.randn(rows, device=DEVICE)
    flop = 2.0 * rows * candidates * width

    def show(what: str, ms: float, products: int) -> None:
        numbers = f"{ms:8.3f} ms {products * flop / ms / 1e9:5.0f} TFLOP/s"
        print(f"{name:7} N{rows} V{candidates} D{width} {what:8}{numbers}", flush=True)

    show("forward", median_ms(lambda _: ops.whole_forward(given, -100), DEVICE, 5), 1)
    for what, (of_hidden, of_weight) in WANTED.items():
        wanted = Wanted(of_hidden, of_weight, False, False)
        grads = (upstream, upstream if what == "both" else None)
        ms = median_ms(lambda _, g=grads, w=wanted: ops.whole_backward(given, found, *g, w), DEVICE, 5)
        show(what, ms, 4 if what == "both" else 2)


def in_float32(rows: int = 25_000, candidates: int = 3_883, width: int = 50) -> None:
    """One forward and one backward to both, Triton and the reference."""
    given = operands(rows, candidates, width, torch.float32)
    found, parts = triton_ops.whole_forward(given, -100), reference.forward(given)
    upstream, wanted = torch.randn(rows, device=DEVICE), Wanted(True, True, False, False)
    by_row = Upstream(parts.maximum, 1 / parts.total, upstream)
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        ways = {
            "triton forward": lambda _: triton_ops.whole_forward(given, -100),
            "triton both": lambda _: triton_ops.whole_backward(given, found, upstream, None, wanted),
            "reference forward": lambda _: reference.forward(given),
            "reference both": lambda _: reference.backward(given, by_row, wanted),
        }
        for name, run in ways.items():
            print(f"float32 {precision:8}{name:18}{median_ms(run, DEVICE, 5):8.3f} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=int, nargs=2, action="append")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--backend", choices=sorted(BACKENDS), action="append")
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args()
    if options.float32:
        in_float32()
    else:
        for shape in options.shape or SHAPES:
            for backend in options.backend or ["sm90", "triton"]:
                passes(backend, options.rows, *shape)
