"""`norm_linear` and `linear_add` on a GPU: numbers, repeatability, sizes in any order."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import last_backend, linear_add, norm_linear

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def inputs(rows, width, widths, tokens):
    generator = torch.Generator().manual_seed(rows)
    columns = sum(widths)
    shapes = ((rows, width), (width,), (width,), (columns, width), (columns,))
    x, *parameters = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    parameters[2] /= width**0.5
    return [x.to(tokens), *parameters]


def results(given, widths, backend, to=None, **options):
    """Parts and all gradients, for random cotangents of the parts and of x."""
    leaves = [tensor.detach().to(to or tensor.dtype).requires_grad_() for tensor in given]
    found = norm_linear(*leaves, widths, backend=backend, **options)
    assert last_backend("norm_linear") == backend
    generator = torch.Generator().manual_seed(1)
    outs = [*found.parts, found.x]
    cotangents = [torch.randn(out.shape, generator=generator).to(out) for out in outs]
    return [*(part.detach() for part in found.parts), *torch.autograd.grad(outs, leaves, cotangents)]


def assert_near(ours, theirs, want):
    for one, other, exact in zip(ours, theirs, want, strict=True):
        assert torch.isfinite(one).all() and one.dtype == other.dtype
        allowed = 2 * (other.double() - exact).norm() + 1e-5 * (exact.norm() + exact.numel() ** 0.5)
        assert (one.double() - exact).norm() <= allowed


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_random_shapes(data):
    width = data.draw(st.sampled_from([2, 16, 33, 64, 100, 256, 1000, 1024, 2048]))
    widths = data.draw(st.lists(st.sampled_from([8, 16, 64, 100, 512]), min_size=1, max_size=4))
    tokens, products = data.draw(
        st.sampled_from(
            [
                (torch.bfloat16, torch.bfloat16),
                (torch.float32, torch.bfloat16),
                (torch.float16, torch.float16),
                (torch.float32, torch.float32),
            ]
        )
    )
    given = inputs(data.draw(st.integers(1, 3000)), width, widths, tokens)
    options = {"dtype": products, "keep_normed": data.draw(st.booleans()), "silu": data.draw(st.booleans())}
    found = [results(given, widths, backend, **options) for backend in ("triton", "reference")]
    assert_near(*found, results(given, widths, "reference", to=torch.float64))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("tokens", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 77, 5000])
def test_the_sum(rows, tokens, with_bias):
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 256), (rows, 768), (256, 768), (256,))
    x, y, weight, bias = [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]
    given = [x.to(tokens), y.bfloat16(), weight / 768**0.5, bias][: 4 if with_bias else 3]
    found = []
    for backend, dtype in (("triton", None), ("reference", None), ("reference", torch.float64)):
        leaves = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in given]
        out = linear_add(*leaves, backend=backend)
        assert last_backend("linear_add") == backend
        cotangent = torch.randn(rows, 256, generator=torch.Generator().manual_seed(2)).to(out)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent)])
    assert_near(*found)


def test_the_same_bits_each_time_for_all_sizes_and_one_artefact():
    from recsys.ops.norm_linear.triton_kernels import backward_kernel, forward_kernel
    from recsys.ops.runtime.column_sums import sums_kernel

    widths, options = (256, 256), {"dtype": torch.bfloat16}
    batches = [inputs(rows, 256, widths, torch.bfloat16) for rows in (1, 7, 512, 2048, 4097)]
    expected = [results(given, widths, "triton", **options) for given in batches]
    kernels = (forward_kernel, backward_kernel, sums_kernel)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    rapid = [
        (i, results(batches[i], widths, "triton", **options)) for n in range(40) for i in (4, n % 4, 0, 3, 1)
    ]
    torch.cuda.synchronize()
    for i, got in rapid:
        assert all(torch.equal(one, other) for one, other in zip(got, expected[i], strict=True))
    after = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]
    assert after == before


def test_nothing_waits_for_the_device():
    widths = (64, 64)
    given = [tensor.requires_grad_() for tensor in inputs(500, 128, widths, torch.float32)]

    def step():
        found = norm_linear(*given, widths, dtype=torch.bfloat16, backend="triton")
        y = found.parts[0]
        linear_add(found.x, y, given[3][:64].t(), backend="triton").sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
