"""The Triton kernels on a GPU: numbers, repeatability, sizes in any order, compiled and exported graphs."""

import random
from typing import NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.fx.experimental import _config as fx_config

from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention, last_backend
from tests.ops.cases import MASKS, layout_of, relative_bias, samples

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class Variant(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    dim: int
    v_dim: int
    bias_rows: int | None
    mask: AttentionMask


def variants(number: int) -> list[Variant]:
    """Some of all combinations, drawn once and for all: each takes seconds to compile."""
    chosen = random.Random(5)
    dims = (16, 33, 64, 64, 128, 128, 200, 256)
    return [
        Variant(
            (torch.bfloat16, torch.float16, torch.float32)[i % 3],
            dims[i % len(dims)],
            dims[i % len(dims)] if i % 2 else chosen.choice(dims),
            (0, 0, None, 2)[i // 2 % 4],
            chosen.choice([*MASKS, AttentionMask(130, 70, True, 5), AttentionMask()]),
        )
        for i in range(number)
    ]


VARIANTS = variants(24)


def case(shapes, contextual, dim, v_dim, heads, dtype, bias_rows=0, seed=0):
    """Inputs on the GPU as (layout, q, k, v, bias), leaves that require gradients."""
    layout = layout_of(samples(contextual, shapes)).to(DEVICE)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(layout.total_len, heads, width, generator=generator).to(DEVICE, dtype).requires_grad_()
        for width in (dim, dim, v_dim)
    )
    bias = None
    if bias_rows != 0:
        host = relative_bias(layout.total_len, rows=bias_rows, seed=seed)
        tables = [
            t.detach().float().to(DEVICE).requires_grad_() for t in (host.position_table, host.time_table)
        ]
        bias = RelativeBias(*tables, host.timestamps.to(DEVICE), host.next_timestamps.to(DEVICE))
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


def assert_near(got, arguments, mask):
    """Not further from float64 than twice the reference in the same type."""
    theirs, want = reference(arguments, mask), reference(arguments, mask, to=torch.float64)
    for i, (ours, other, exact) in enumerate(zip(got, theirs, want, strict=True)):
        assert torch.isfinite(ours).all(), f"result {i} is not finite"
        norm = exact.norm()
        error, allowed = ((tensor.double() - exact).norm() for tensor in (ours, other))
        own = 1e-5 if arguments[1].dtype == torch.float32 else 2**-11  # of the fast sigmoid
        assert error <= 2 * allowed + own * norm + 1e-12, (
            f"result {i}: {error / norm:.2e} off, reference {allowed / norm:.2e}"
        )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@hypothesis.settings(max_examples=20)
@hypothesis.given(data=st.data())
def test_random_layouts(variant, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), min_size=1, max_size=5))
    contextual = data.draw(st.sampled_from([0, 1, 6]))
    arguments = case(shapes, contextual, variant.dim, variant.v_dim, 2, variant.dtype, variant.bias_rows)
    deterministic = data.draw(st.booleans())
    assert_near(results(*arguments, variant.mask, "triton", deterministic), arguments, variant.mask)


@pytest.mark.parametrize("bias_rows", [0, 2])
def test_deterministic_means_the_same_bits(bias_rows):
    arguments = case([(900, 60), (5, 0), (2000, 9)], 3, 64, 64, 2, torch.bfloat16, bias_rows)
    first = results(*arguments, AttentionMask(), "triton")
    for _ in range(5):
        again = results(*arguments, AttentionMask(), "triton")
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_other_sizes_in_any_order_use_one_artefact_and_stay_right():
    from recsys.ops.hstu_attention.triton.forward import forward_kernel

    sizes = [[(n, 0)] for n in (1, 7, 512, 2048, 4097)]
    batches = [case(shapes, 0, 64, 64, 2, torch.bfloat16) for shapes in sizes]
    expected = [results(*batch, AttentionMask(), "triton") for batch in batches]
    for batch, got in zip(batches, expected, strict=True):
        assert_near(got, batch, AttentionMask())
    before = sum(len(cache[0]) for cache in forward_kernel.device_caches.values())
    rapid = [
        (i, results(*batches[i], AttentionMask(), "triton")) for n in range(40) for i in (4, n % 4, 0, 3, 1)
    ]
    torch.cuda.synchronize()
    for i, got in rapid:
        assert all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True))
    assert sum(len(cache[0]) for cache in forward_kernel.device_caches.values()) == before


def test_poisoned_memory_and_neighbours():
    torch.use_deterministic_algorithms(True)
    try:
        arguments = case([(300, 9), (0, 0), (65, 1)], 2, 64, 32, 2, torch.bfloat16, 2)
        layout, *tensors, bias = arguments
        padded = []
        for tensor in tensors:
            poisoned = tensor.new_full((tensor.shape[0] + 512, *tensor.shape[1:]), float("nan"))
            poisoned.detach()[256:-256] = tensor.detach()
            padded.append(poisoned.detach()[256:-256].requires_grad_())
        clean = results(*arguments, AttentionMask(), "triton")
        got = results(layout, *padded, bias, AttentionMask(), "triton")
        assert all(torch.equal(one, other) for one, other in zip(got, clean, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


class Attention(torch.nn.Module):
    """What a compiler sees: lengths are inputs."""

    def forward(self, q, k, v, lengths, offsets, num_targets):
        layout = SequenceLayout.trusted(lengths, offsets, num_targets, 0, q.shape[0], q.shape[0], q.shape[0])
        return hstu_attention(q, k, v, layout, AttentionMask(window=40), scale_len=64, backend="triton")


@pytest.mark.parametrize("how", ["compile", "export"])
def test_one_graph_for_all_sizes(how):
    model = Attention()
    batches = []
    for shapes in ([(70, 3), (5, 0)], [(3, 1)], [(400, 9), (0, 2), (33, 0)]):
        layout, q, k, v, _ = case(shapes, 0, 64, 64, 2, torch.bfloat16)
        batches.append((q, k, v, layout.lengths, layout.offsets, layout.num_targets))
    if how == "compile":
        made = torch.compile(model, dynamic=True, fullgraph=True)
    else:
        shapes = tuple({0: torch.export.Dim.AUTO} for _ in batches[0])
        with torch.no_grad(), fx_config.patch(backed_size_oblivious=True):  # else not for a single sample
            made = torch.export.export(model, batches[0], dynamic_shapes=shapes).module()
    for batch in batches:
        torch.testing.assert_close(made(*batch), model(*batch))
        if how == "compile":
            cotangent = torch.randn_like(batch[2])
            got, want = (torch.autograd.grad(m(*batch), batch[:3], cotangent) for m in (made, model))
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other)
