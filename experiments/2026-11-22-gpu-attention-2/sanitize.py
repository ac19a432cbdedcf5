#!/usr/bin/env python3
"""One small case of each Hopper kernel, for compute-sanitizer: sanitize.py DIM causal|window."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, SequenceLayout  # noqa: E402
from recsys.ops.hstu_attention import sm90_launch, sm90_two_pass  # noqa: E402
from recsys.ops.hstu_attention.triton_launch import Problem  # noqa: E402

dim = int(sys.argv[1])
mask = AttentionMask(window=100, prefix=5) if sys.argv[2] == "window" else AttentionMask()
layout = SequenceLayout(torch.tensor([200, 70, 1, 300]), torch.tensor([3, 0, 1, 9])).to("cuda")
problem = Problem(layout, mask, dim**-0.5, 400.0, None)
torch.manual_seed(0)
q, k, v, g = (torch.randn(layout.total_len, 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
for sizes in (sm90_launch.SIZES, sm90_launch.LONG_SIZES):
    if dim in sizes:
        sm90_launch.forward(q, k, v, problem, sizes[dim], captured=False)
sm90_two_pass.backward(g, q, k, v, problem)
if dim in sm90_launch.BACKWARD_SIZES:
    sm90_launch.backward(g, q, k, v, problem, captured=False)
torch.cuda.synchronize()
