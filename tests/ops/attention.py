"""Random calls of `hstu_attention`, and how near a backend has to come to float64."""

import torch

from recsys.ops import RelativeBias, hstu_attention, last_backend
from tests.ops.cases import layout_of, relative_bias, samples


def case(shapes, contextual, dim, v_dim, heads, dtype, bias_rows=0, seed=0, device="cuda"):
    """Inputs on the device as (layout, q, k, v, bias), leaves that require gradients."""
    layout = layout_of(samples(contextual, shapes)).to(device)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(layout.total_len, heads, width, generator=generator).to(device, dtype).requires_grad_()
        for width in (dim, dim, v_dim)
    )
    bias = None
    if bias_rows != 0:
        host = relative_bias(layout.total_len, rows=bias_rows, seed=seed)
        tables = [
            t.detach().float().to(device).requires_grad_() for t in (host.position_table, host.time_table)
        ]
        bias = RelativeBias(*tables, host.timestamps.to(device), host.next_timestamps.to(device))
    return layout, q, k, v, bias


def results(layout, q, k, v, bias, mask, backend, deterministic=True, to=None):
    """Output and all gradients for random cotangents; `to`: computed in that type, from the same inputs."""
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v)
    if to is not None:
        q, k, v = (t.detach().to(to).requires_grad_() for t in (q, k, v))
        if bias is not None:
            tables = [t.detach().to(to).requires_grad_() for t in (bias.position_table, bias.time_table)]
            bias = RelativeBias(*tables, bias.timestamps, bias.next_timestamps)
    out = hstu_attention(
        q, k, v, layout, mask, scale_len=64, bias=bias, backend=backend, deterministic=deterministic
    )
    assert last_backend("hstu_attention") == backend
    leaves = [q, k, v] + ([] if bias is None else [bias.position_table, bias.time_table])
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(out))]


def reference(arguments, mask, to=None):
    return results(*arguments, mask, "reference", deterministic=False, to=to)


def assert_near(got, arguments, mask, own=None):
    """Not further from float64 than twice the reference in the same type, and `own` of the norm."""
    theirs, want = reference(arguments, mask), reference(arguments, mask, to=torch.float64)
    if own is None:
        own = 1e-5 if arguments[1].dtype == torch.float32 else 2**-11  # of the fast sigmoid
    for i, (ours, other, exact) in enumerate(zip(got, theirs, want, strict=True)):
        assert torch.isfinite(ours).all(), f"result {i} is not finite"
        norm = exact.norm()
        error, allowed = ((tensor.double() - exact).norm() for tensor in (ours, other))
        assert error <= 2 * allowed + own * norm + 1e-12, (
            f"result {i}: {error / norm:.2e} off, reference {allowed / norm:.2e}"
        )


def with_times(bias, kind, total_len):
    """The tables of a bias with times of this kind."""
    times = times_of(kind, total_len).to(bias.timestamps.device)
    return RelativeBias(bias.position_table, bias.time_table, times, torch.cat([times[1:], times[-1:] + 60]))


def times_of(kind, total_len):
    """Timestamps of histories as they come, and such as none should be."""
    part = torch.rand(total_len, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    now = 1_763_000_000
    return {
        "hours": lambda: now + (9 * part).exp().to(torch.int64).cumsum(0),
        "years": lambda: now + (18 * part).exp().to(torch.int64).cumsum(0),
        "equal": lambda: torch.full((total_len,), now),
        "minutes": lambda: 60 * torch.arange(total_len) - 2**33,
        "anywhere": lambda: (part * 2**40).to(torch.int64) - 2**39,
        "missing": lambda: torch.where(part < 0.1, 0, now + 1000 * torch.arange(total_len)),
        "backward": lambda: 2**34 - (part * 2**26).to(torch.int64).cumsum(0),
    }[kind]()
