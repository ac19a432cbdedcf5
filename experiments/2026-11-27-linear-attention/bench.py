"""Times `linear_attention` against `hstu_attention` and, if it can be imported, flash-linear-attention.

    python experiments/2026-11-27-linear-attention/bench.py check      errors against float64
    python experiments/2026-11-27-linear-attention/bench.py time [--json FILE]
"""

import argparse
import json
import statistics

import torch
from torch import Tensor

from recsys.ops import SequenceLayout, hstu_attention, last_backend, linear_attention

HEADS = 8


def inputs(lengths: list[int], dim: int, *, targets: int = 0, delta: bool = False, per_head: bool = False):
    """A layout and bfloat16 leaves; keys have length 1 with the delta rule."""
    layout = SequenceLayout(torch.tensor(lengths), torch.tensor([min(targets, n) for n in lengths])).to("cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (layout.total_len, HEADS, dim)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    q, k, v = normal(), normal(), normal()
    if delta:
        k = torch.nn.functional.normalize(k, dim=-1)
    decay = -torch.nn.functional.softplus(normal() - 3)
    decay = decay[..., 0].contiguous() if per_head else decay
    leaves = [*(x.bfloat16() for x in (q, k, v)), decay.float()]
    if delta:
        leaves.append(torch.rand(shape[:2], generator=generator, device="cuda"))
    return layout, [leaf.requires_grad_() for leaf in leaves]


def call(layout, leaves, backend="auto", dtype=None):
    leaves = leaves if dtype is None else [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    beta = leaves[4] if len(leaves) > 4 else None
    found = linear_attention(*leaves[:4], layout, beta=beta, backend=backend)
    return found, leaves


def results(layout, leaves, backend, dtype=None):
    found, leaves = call(layout, leaves, backend, dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, device="cuda").to(x) for x in found]
    return [*found, *torch.autograd.grad(list(found), leaves, cotangents)]


def check() -> bool:
    """Prints relative errors by norm; the reference's in the same types beside ours."""
    right = True
    names = ("out", "final", "q", "k", "v", "decay", "beta")
    for lengths, targets in (([700, 64, 1, 333, 130], 5), ([5000, 3], 0)):
        for dim in (64, 128):
            for delta in (False, True):
                for per_head in (False, True):
                    layout, leaves = inputs(lengths, dim, targets=targets, delta=delta, per_head=per_head)
                    ours = results(layout, leaves, "triton")
                    theirs = results(layout, leaves, "reference")
                    exact = results(layout, leaves, "reference", torch.float64)
                    line = []
                    for name, got, other, want in zip(names, ours, theirs, exact, strict=False):
                        error, allowed = ((x.double() - want).norm() / want.norm() for x in (got, other))
                        bad = not error <= 2 * allowed + 5e-3
                        right &= not bad
                        line.append(f"{name} {error:.1e} ({allowed:.1e}){'!' if bad else ''}")
                    print(len(lengths), dim, "delta" if delta else "", "head" if per_head else "", *line, flush=True)
    return right


def milliseconds(function, repeats: int = 10) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def both_passes(forward, leaves) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward."""
    out = forward()
    cotangent = torch.randn_like(out)

    def step():
        torch.autograd.grad(forward(), leaves, cotangent)

    with torch.no_grad():
        alone = milliseconds(forward)
    return alone, milliseconds(step)


def peers():
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gla import chunk_gla
        from fla.ops.kda import chunk_kda
    except Exception as error:
        print("no flash-linear-attention:", error)
        return {}
    return {"chunk_gla": chunk_gla, "chunk_kda": chunk_kda, "chunk_gated_delta_rule": chunk_gated_delta_rule}


def time(record: str | None, fla: dict) -> None:
    found = []
    shapes = {
        "B32 L256": [256] * 32,
        "B32 L2048": [2048] * 32,
        "B32 zipf": [max(1, int(4096 / (1 + i) ** 0.6)) for i in range(32)],
        "B4 L8192": [8192] * 4,
        "B1 L65536": [65536],
    }
    for name, lengths in shapes.items():
        for dim in (64, 128):
            forms = {"": {}, "head": {"per_head": True}, "delta": {"delta": True}, "delta head": {"delta": True, "per_head": True}}
            for form, options in forms.items():
                layout, leaves = inputs(lengths, dim, **options)
                times = {}
                times["linear"] = both_passes(lambda: call(layout, leaves)[0].out, leaves)  # noqa: B023
                assert last_backend("linear_attention") == "triton"
                q, k, v, decay, *beta = leaves
                offsets = layout.offsets
                fields = {"cu_seqlens": offsets}
                if form == "" and fla:
                    times["chunk_gla"] = both_passes(lambda: fla["chunk_gla"](q[None], k[None], v[None], g=decay[None], **fields)[0], leaves)  # noqa: B023, E501
                if form == "delta" and fla:
                    times["chunk_kda"] = both_passes(lambda: fla["chunk_kda"](q[None], k[None], v[None], g=decay[None], beta=beta[0][None], **fields)[0], leaves)  # noqa: B023, E501
                if form == "delta head" and fla:
                    times["chunk_gated_delta_rule"] = both_passes(lambda: fla["chunk_gated_delta_rule"](q[None], k[None], v[None], g=decay[None], beta=beta[0][None], **fields)[0], leaves)  # noqa: B023, E501
                if form == "":
                    times["hstu"] = both_passes(lambda: hstu_attention(q, k, v, layout, scale_len=2048.0), [q, k, v])  # noqa: B023
                print(f"{name} D{dim} {form:10}", *(f"{who} {a:.3f} {b:.3f}" for who, (a, b) in times.items()), flush=True)
                found.append({"shape": name, "dim": dim, "form": form, "ms": times})
    if record:
        with open(record, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["check", "time"])
    parser.add_argument("--json")
    parser.add_argument("--peers", action="store_true", help="also flash-linear-attention, which tunes for minutes")
    arguments = parser.parse_args()
    if arguments.what == "check":
        raise SystemExit(0 if check() else 1)
    time(arguments.json, peers() if arguments.peers else {})
