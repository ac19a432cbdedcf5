#!/usr/bin/env python3
"""One small case of each Hopper kernel, for compute-sanitizer: sanitize.py DIM causal|window.

Three programs work on some dozen tiles each: so buffers go from tile to tile. Results are compared with
float64, on the CPU, where the tool does not look.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, SequenceLayout  # noqa: E402
from recsys.ops.hstu_attention import reference, sm90_launch, sm90_start, sm90_two_pass  # noqa: E402
from recsys.ops.hstu_attention.triton_launch import Problem  # noqa: E402

sm90_start.num_processors = lambda device: 3
LENGTHS, TARGETS = [200, 70, 1, 300, 777, 129, 64, 450], [3, 0, 1, 9, 0, 70, 0, 2]

dim = int(sys.argv[1])
mask = AttentionMask(window=100, prefix=5) if sys.argv[2] == "window" else AttentionMask()
layout = SequenceLayout(torch.tensor(LENGTHS), torch.tensor(TARGETS))
torch.manual_seed(0)
q, k, v, g = (torch.randn(layout.total_len, 2, dim).bfloat16() for _ in range(4))
leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
rest = {"alpha": dim**-0.5, "scale_len": 400.0, "bias": None, "deterministic": False}
exact_out = reference.run(*leaves, layout, mask, **rest)
exact = torch.autograd.grad(exact_out, leaves, g.double())


def compare(name: str, got: torch.Tensor, right: torch.Tensor) -> None:
    off = float((got.cpu().double() - right).norm() / right.norm())
    print(f"{name} {off:.1e} off", flush=True)
    if not off < 1e-2:
        raise SystemExit(f"{name} is wrong")


problem = Problem(layout.to("cuda"), mask, dim**-0.5, 400.0, None)
q, k, v, g = (tensor.cuda() for tensor in (q, k, v, g))
for sizes in (sm90_launch.SIZES, sm90_launch.LONG_SIZES):
    if dim in sizes:
        compare("out", sm90_launch.forward(q, k, v, problem, sizes[dim], captured=False), exact_out.detach())
ways = {"two passes": sm90_two_pass.backward}
if dim in sm90_launch.BACKWARD_SIZES:
    ways["one pass"] = sm90_launch.backward
for name, way in ways.items():
    made = way(g, q, k, v, problem, captured=False)
    for one, right in zip(made[:3], exact, strict=True):
        compare(name, one, right)
