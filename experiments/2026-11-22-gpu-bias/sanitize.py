#!/usr/bin/env python3
"""Small batches through all kernels with a bias, for compute-sanitizer: sanitize.py DIM [DIM ...]

Heads of 64 take `sm90_biased`, others `keys_kernel` with the sums; then the kernels that are deterministic.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys import environment

environment.prefer_packaged_ptxas()
from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention  # noqa: E402

NOW = 1_763_000_000
BATCHES = [
    # lengths, targets, contextual tokens, mask, the largest step of time as a power of e; None: in no order
    ([200, 70, 1, 300], [3, 0, 1, 9], 0, AttentionMask(), 9),
    ([150, 64, 3, 129], [70, 0, 0, 1], 3, AttentionMask(130, 70, True, 5), 18),
    ([260, 65], [0, 5], 1, AttentionMask(contextual_reads_history=False, target_group_size=3), 3),
    ([190, 5, 128], [2, 1, 0], 0, AttentionMask(window=40), None),
]


def times_of(total_len: int, largest: int | None) -> torch.Tensor:
    part = torch.rand(total_len, dtype=torch.float64)
    if largest is None:
        return (part * 2**40).to(torch.int64)
    return NOW + (largest * part).exp().to(torch.int64).cumsum(0)


for dim in map(int, sys.argv[1:]):
    for lengths, targets, contextual, mask, largest in BATCHES:
        torch.manual_seed(0)
        layout = SequenceLayout(torch.tensor(lengths), torch.tensor(targets), contextual).to("cuda")
        shape = layout.total_len, 2, dim
        q, k, v, grad = (torch.randn(shape).to("cuda", torch.bfloat16).requires_grad_() for _ in range(4))
        tables = [torch.randn(2, size).cuda().requires_grad_() for size in (70, 40)]
        times = times_of(layout.total_len, largest).cuda()
        bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60]))
        for once in (False, True):
            out = hstu_attention(
                q, k, v, layout, mask, scale_len=300.0, bias=bias, backend="triton", deterministic=once
            )
            made = torch.autograd.grad(out, [q, k, v, *tables], grad.detach())
            if not all(one.isfinite().all() for one in (out, *made)):
                raise SystemExit(f"{lengths}: not finite")
    print("done", dim, flush=True)
