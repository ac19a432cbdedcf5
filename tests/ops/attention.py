"""Random calls of `hstu_attention` as problems of the harness, and the loops that they are compared with."""

from __future__ import annotations

import dataclasses

import torch

from recsys.ops import AttentionMask, RelativeBias, hstu_attention
from tests.ops import harness, oracle
from tests.ops.cases import layout_of, qkv, relative_bias, samples
from tests.ops.harness import Problem, Runner
from tests.ops.oracle import Sample

CAUSAL = AttentionMask()
BIAS = ("position_table", "time_table", "timestamps", "next_timestamps")


def attend(q, k, v, *, layout, mask, backend, deterministic=True, **rest):
    """`hstu_attention` with the parts of its bias by name, if there are any."""
    bias = RelativeBias(*(rest.pop(name) for name in BIAS)) if "time_table" in rest else None
    # The reference refuses to sum tables in a fixed order on a GPU.
    rest |= {"deterministic": deterministic and backend != "reference"}
    return hstu_attention(q, k, v, layout, mask, bias=bias, backend=backend, **rest)


def samples_of(layout) -> list[Sample]:
    """The samples that a layout describes."""
    sizes, context = (
        zip(layout.lengths.tolist(), layout.num_targets.tolist(), strict=True),
        layout.num_contextual,
    )
    return [Sample(context, length - context - targets, targets) for length, targets in sizes]


def by_loops(q, k, v, *, layout, mask, scale_len, alpha=None, **rest):
    """Computes `attend` by loops over queries and keys."""
    bias = RelativeBias(*(rest[name] for name in BIAS)) if "time_table" in rest else None
    alpha = q.shape[2] ** -0.5 if alpha is None else alpha
    return oracle.hstu(q, k, v, samples_of(layout), mask, alpha, scale_len, bias)


def problem(shapes, contextual=0, mask=CAUSAL, *, heads=1, bias_rows=0, times=None, dims=(3, 2), **options):
    """A call in float64. `bias_rows`: None for one table, 0 for no bias; `times`: a kind of `times_of`;
    `dims`: of a head of q and k, and of v."""
    layout = layout_of(samples(contextual, shapes))
    dim, v_dim = dims
    tensors = dict(zip("qkv", qkv(layout.total_len, heads=heads, dim=dim, v_dim=v_dim), strict=True))
    options = {"layout": layout, "mask": mask, "scale_len": 7} | options
    if bias_rows != 0:
        bias = relative_bias(layout.total_len, rows=bias_rows)
        tensors |= {"position_table": bias.position_table, "time_table": bias.time_table}
        options |= {"timestamps": bias.timestamps, "next_timestamps": bias.next_timestamps}
        if times is not None:
            options |= dict(zip(BIAS[2:], times_of(times, layout.total_len), strict=True))
    return Problem("hstu_attention", attend, tensors, options)


def large(shapes, contextual, dims, dtype, bias_rows=0, mask=CAUSAL, **rest) -> Problem:
    """A problem with q, k and v of variance 1 in `dtype`, and tables in float32."""
    given = problem(shapes, contextual, mask, dims=dims, bias_rows=bias_rows, **{"heads": 2, **rest})
    tensors = {name: tensor / 2 if name in "qkv" else tensor for name, tensor in given.tensors.items()}
    given = dataclasses.replace(given, tensors=tensors).with_options(scale_len=64)
    return given.cast(dtype, position_table=torch.float32, time_table=torch.float32)


def between_nan(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor, as a view between rows of NaN."""
    padded = tensor.new_full((tensor.shape[0] + 512, *tensor.shape[1:]), torch.nan)
    padded[256:-256] = tensor
    return padded[256:-256]


def with_neighbours(given: Problem) -> Problem:
    """The problem with q, k and v between rows of NaN."""
    return dataclasses.replace(
        given, tensors=given.tensors | {name: between_nan(given.tensors[name]) for name in "qkv"}
    )


def assert_near(given: Problem, runner: Runner, floor: float | None = None) -> harness.Compared:
    """Not further from float64 than twice the reference in the same type, and `own` of the norm."""
    if floor is None:
        floor = 1e-5 if given.tensors["q"].dtype == torch.float32 else 2**-11  # of the fast sigmoid
    return harness.assert_near(given, runner, floor=floor, absolute=1e-12)


def times_of(kind: str, total_len: int) -> list[torch.Tensor]:
    """Timestamps and next timestamps of histories as they come, and such as none should be."""
    part = torch.rand(total_len, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    now = 1_763_000_000
    times = {
        "hours": lambda: now + (9 * part).exp().to(torch.int64).cumsum(0),
        "years": lambda: now + (18 * part).exp().to(torch.int64).cumsum(0),
        "equal": lambda: torch.full((total_len,), now),
        "minutes": lambda: 60 * torch.arange(total_len) - 2**33,
        "anywhere": lambda: (part * 2**40).to(torch.int64) - 2**39,
        "missing": lambda: torch.where(part < 0.1, 0, now + 1000 * torch.arange(total_len)),
        "backward": lambda: 2**34 - (part * 2**26).to(torch.int64).cumsum(0),
    }[kind]()
    return [times, torch.cat([times[1:], times[-1:] + 60])]
