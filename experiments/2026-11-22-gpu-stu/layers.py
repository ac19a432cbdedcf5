"""A layer of the form "uvqk": projection and SiLU by cuBLAS and PyTorch, and by the Hopper kernel, in turn.

python experiments/2026-11-22-gpu-stu/layers.py
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from recsys.modules.stu import STUForm, STULayer
from recsys.ops import AttentionMask, SequenceLayout, hstu_attention
from recsys.ops.norm_linear import sm90_launch, triton_ops

CASES = (
    (1024, 4, 32, 4099, "ugn", None),
    (512, 8, 32, 2048, "ugn", None),
    (256, 4, 32, 8226, "concat", 256),
)
"""Width, heads, samples, tokens of each, gate, window."""

ROUNDS, FIRST = 24, 4
"""Turns; those before this one are not counted."""


def in_turn(call: Callable[[int], object]) -> str:
    """Medians of both, ms."""
    found: dict[bool, list] = {False: [], True: []}
    for turn in range(ROUNDS):
        for kernel in (False, True) if turn % 2 else (True, False):
            sm90_launch.LEAST_DEPTH = 1 if kernel else 2**31
            call(turn)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call(turn + 1)
            call(turn + 2)
            end.record()
            if turn >= FIRST:
                found[kernel].append((begin, end))
    torch.cuda.synchronize()
    ms = [statistics.median(a.elapsed_time(b) / 2 for a, b in pairs) for pairs in found.values()]
    return f"cuBLAS {ms[0]:.3f} kernel {ms[1]:.3f} ({ms[1] / ms[0] - 1:+.1%})"


def time_case(width: int, heads: int, batch: int, length: int, gate: str, window: int | None) -> None:
    """Prints the projection, the layer's forward and its step."""
    torch.manual_seed(0)
    dim = width // heads
    form = STUForm(activation="uvqk", gate=gate)
    layer = STULayer(width, num_heads=heads, qk_dim=dim, v_dim=dim, form=form).cuda()
    layout = SequenceLayout(torch.full((batch,), length)).to("cuda")
    size = layout.total_len, width
    sets = [torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2)]
    cotangent, leaves = torch.randn_like(sets[0]), list(layer.parameters())
    attend = partial(hstu_attention, layout=layout, mask=AttentionMask(window), scale_len=float(length))
    weight, bias = (one.detach().bfloat16() for one in (layer.uvqk.weight, layer.uvqk.bias))

    def project(turn: int) -> None:
        with torch.no_grad():
            triton_ops.projected_and_silu(sets[turn % 2], weight, bias)

    def forward(turn: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layer(sets[turn % 2], attend)

    def step(turn: int) -> None:
        torch.autograd.grad(forward(turn), [sets[turn % 2], *leaves], cotangent)

    texts = [
        f"{name} {in_turn(call)}" for name, call in (("alone", project), ("forward", forward), ("step", step))
    ]
    print(f"width {width}, {heads} heads, {batch} x {length}: " + "; ".join(texts), flush=True)


if __name__ == "__main__":
    for case in CASES:
        time_case(*case)
