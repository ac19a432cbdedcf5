#!/usr/bin/env python3
"""Find where the output of an attention backend is wrong: head, rows, and the blocks of keys behind it.

    python scripts/find_wrong_tile.py --backend sm90 --dim 64 --lengths 64 [--targets 0] [--contextual 0]
        [--window 128] [--prefix 0] [--target-window] [--group 1] [--heads 1] [--strip 64] [--keys 128]

It prints one line per sample, head and strip of rows with its error, then analyzes the first wrong one: for
each block of keys, the values of all other keys are zeroed, so that the output is the contribution of this
block. It reports a block whose contribution is that of another block, missing, doubled or unmasked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recsys.ops import AttentionMask, SequenceLayout, hstu_attention  # noqa: E402
from recsys.ops.jagged.mask import dense_mask  # noqa: E402

SCALE = 64.0
TOLERANCE = 2e-2
"""Allowed error relative to the norm of a strip: weights and outputs are rounded to 16 bits."""


def run(backend: str, q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, mask: AttentionMask) -> Tensor:
    out = hstu_attention(q, k, v, layout, mask, scale_len=SCALE, backend=backend)
    if out.is_cuda:
        torch.cuda.synchronize()
    return out.detach()


def error(got: Tensor, want: Tensor) -> float:
    """Return the error relative to the norm of `want`; 0 if both are zero."""
    difference = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-6)
    return float(difference) if bool(difference.isfinite()) else float("inf")


def contributions(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, first: int, last: int, keys: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute what each block of keys adds to rows `first` to `last` of one sample and head, in float64, with
    the mask and without."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    score = q[first:last] @ k.T * q.shape[1] ** -0.5
    weight = torch.nn.functional.silu(score) / SCALE
    masked, unmasked = [], []
    for start in range(0, k.shape[0], keys):
        block = slice(start, start + keys)
        unmasked.append(weight[:, block] @ v[block])
        masked.append((weight * seen[first:last])[:, block] @ v[block])
    return masked, unmasked


def diagnose(got: Tensor, number: int, masked: list[Tensor], unmasked: list[Tensor]) -> str:
    """Describe what the contribution of a block looks like."""
    if error(got, masked[number]) < TOLERANCE:
        return "right"
    guesses = {
        "not masked": unmasked[number],
        "added twice": 2 * masked[number],
        "missing": torch.zeros_like(masked[number]),
    }
    guesses |= {
        f"masked like block {i}": masked_block for i, masked_block in enumerate(masked) if i != number
    }
    for name, guess in guesses.items():
        if error(got, guess) < TOLERANCE or (name == "missing" and not bool(got.any())):
            return f"WRONG: {name}"
    rows = [i for i in range(got.shape[0]) if error(got[i], masked[number][i]) > 2 * TOLERANCE]
    columns = [i for i in range(got.shape[1]) if error(got[:, i], masked[number][:, i]) > 2 * TOLERANCE]
    return (
        f"WRONG by {error(got, masked[number]):.3f}: {len(rows)} rows ({rows[:12]}), "
        f"{len(columns)} columns ({columns[:12]}), {int((~got.isfinite()).sum())} not finite"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Finds the first wrong tile of an attention backend.")
    parser.add_argument("--backend", default="sm90")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64])
    parser.add_argument("--targets", type=int, default=0, help="number of targets at the end of each sample")
    parser.add_argument("--contextual", type=int, default=0)
    parser.add_argument("--window", type=int)
    parser.add_argument("--prefix", type=int, default=0)
    parser.add_argument("--target-window", action="store_true")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--strip", type=int, default=64, help="number of rows per printed line")
    parser.add_argument("--keys", type=int, default=128, help="number of keys per block")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = torch.tensor(options.lengths)
    layout = SequenceLayout(lengths, torch.full_like(lengths, options.targets), options.contextual).to(device)
    mask = AttentionMask(options.window, options.prefix, options.target_window, options.group)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(layout.total_len, options.heads, options.dim).to(device, torch.bfloat16) for _ in range(3)
    )
    seen = dense_mask(mask, layout)
    got = run(options.backend, q, k, v, layout, mask)
    want = run("reference", q.double(), k.double(), v.double(), layout, mask)
    wrong = None
    for sample, length in enumerate(options.lengths):
        start = int(layout.offsets[sample])
        for head in range(options.heads):
            for first in range(0, length, options.strip):
                rows = slice(start + first, start + min(first + options.strip, length))
                off = error(got[rows, head], want[rows, head])
                mark = "" if off < TOLERANCE else "  <-- WRONG"
                print(f"sample {sample} head {head} rows {first:5d}+: {off:.5f}{mark}")
                if mark and wrong is None:
                    wrong = (sample, head, first)
    if wrong is None:
        print("all right")
        return 0
    sample, head, first = wrong
    start, length = int(layout.offsets[sample]), options.lengths[sample]
    last = min(first + options.strip, length)
    rows = slice(start, start + length)
    masked, unmasked = contributions(
        q[rows, head], k[rows, head], v[rows, head], seen[sample], first, last, options.keys
    )
    print(f"\nsample {sample} head {head} rows {first} to {last}, block by block:")
    for number in range(len(masked)):
        alone = torch.zeros_like(v)
        block = slice(start + number * options.keys, start + min((number + 1) * options.keys, length))
        alone[block] = v[block]
        part = run(options.backend, q, k, alone, layout, mask)[start + first : start + last, head]
        print(f"  keys {number * options.keys:5d}+: {diagnose(part, number, masked, unmasked)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
