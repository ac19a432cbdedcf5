"""The Hopper kernel on a GPU: from one tile to random layouts; sizes in any order; neighbours with NaN."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import AttentionMask, SequenceLayout, explain, hstu_attention
from tests.ops.attention import assert_near, case, results
from tests.ops.cases import MASKS

pytestmark = pytest.mark.gpu

WIDTHS = (64, 128, 256)


@pytest.fixture(autouse=True)
def usable(monkeypatch):
    layout, q, k, v, _ = case([(5, 0)], 0, 64, 64, 1, torch.bfloat16)
    support = dict(explain("hstu_attention", q, k, v, layout, scale_len=1).rows)["sm90"]
    if not support.ok:
        pytest.skip(support.reason)
    from recsys.ops.hstu_attention.hopper import ops

    in_one_pass = dict.fromkeys((64, 128), (-1, -1))  # wherever it may be
    monkeypatch.setattr(ops, "ONE_PASS_ABOVE", in_one_pass)


def check(shapes, contextual, dim, mask, *, heads=2, dtype=torch.bfloat16):
    arguments = case(shapes, contextual, dim, dim, heads, dtype)
    for deterministic in (False, True):
        assert_near(results(*arguments, mask, "sm90", deterministic), arguments, mask)


@pytest.mark.parametrize("length", [64, 1, 65, 128, 129, 300, 1000, 4097])
@pytest.mark.parametrize("dim", WIDTHS)
def test_one_causal_sample(dim, length):
    check([(length, 0)], 0, dim, AttentionMask(), heads=1)


@pytest.mark.parametrize(
    "mask", [*MASKS[::3], AttentionMask(window=40, prefix=9), AttentionMask(130, 70, True, 5)]
)
def test_masks(mask):
    check([(150, 3), (0, 2), (0, 0), (260, 0), (1, 140), (20, 20)], 3, 64, mask)


@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(window=40, prefix=9), AttentionMask(130, 70, True, 5)], ids=str
)
@pytest.mark.parametrize("dim", [64, 128])
def test_masks_with_the_tiles_of_long_rows(dim, mask, monkeypatch):
    from recsys.ops.hstu_attention.hopper import launch

    for many in ("MANY_KEYS", "MANY_IN_WINDOW"):
        monkeypatch.setattr(launch, many, 0)
    for contextual in (3, 70):
        check([(150, 3), (0, 2), (0, 0), (700, 0), (1, 140), (193, 20)], contextual, dim, mask)


# A few forms, each of which takes many seconds to compile, and many layouts of each.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "mask"),
    [
        (64, AttentionMask(130, 70, True, 5)),
        (64, AttentionMask(window=200)),
        (128, AttentionMask()),
        (128, AttentionMask(130, 70, True, 5)),
        (256, AttentionMask(window=200, contextual_reads_history=False)),
    ],
    ids=str,
)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_random_layouts(dim, mask, dtype, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 150)), min_size=1, max_size=6))
    check(shapes, data.draw(st.sampled_from([0, 1, 6, 130])), dim, mask, dtype=dtype)


@pytest.mark.parametrize("dim", WIDTHS)
def test_other_sizes_in_any_order_use_one_artefact_and_give_the_same_bits(dim):
    from recsys.ops.hstu_attention.hopper.forward import forward_kernel

    sizes = [[(n, 0)] for n in (1, 7, 512, 2048, 4097)] + [[(700, 3), (0, 1), (33, 0)] * 20]
    batches = [case(shapes, 0, dim, dim, 2, torch.bfloat16) for shapes in sizes]
    expected = [results(*batch, AttentionMask(), "sm90", False) for batch in batches]
    for batch, got in zip(batches, expected, strict=True):
        assert_near(got, batch, AttentionMask())
    before = sum(len(cache[0]) for cache in forward_kernel.device_caches.values())
    rapid = [
        (i, results(*batches[i], AttentionMask(), "sm90", False))
        for n in range(40)
        for i in (5, n % 5, 0, 4, 1)
    ]
    torch.cuda.synchronize()
    for i, (out, grad_q, *others) in rapid:
        want, want_q, *rest = expected[i]
        assert all(torch.equal(one, other) for one, other in zip([out, *others], [want, *rest], strict=True))
        torch.testing.assert_close(grad_q, want_q, rtol=2**-7, atol=1e-5)  # its sums come in any order
    assert sum(len(cache[0]) for cache in forward_kernel.device_caches.values()) == before


@pytest.mark.parametrize("dim", WIDTHS)
def test_a_sample_of_nan_leaves_its_neighbours_alone(dim):
    shapes = [(130, 3), (70, 2), (200, 0)]
    layout, *tensors, bias = case(shapes, 2, dim, dim, 2, torch.bfloat16)
    clean = results(layout, *tensors, bias, AttentionMask(), "sm90")
    start, end = (int(layout.offsets[i]) for i in (1, 2))
    for tensor in tensors:
        tensor.detach()[start:end] = float("nan")
    dirty = results(layout, *tensors, bias, AttentionMask(), "sm90")
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one[:start], other[:start]) and torch.equal(one[end:], other[end:])


def test_parts_of_one_projection_and_odd_strides():
    layout, q, k, v, _ = case([(300, 9), (65, 1)], 2, 64, 64, 3, torch.bfloat16)
    whole = torch.cat([t.detach().reshape(t.shape[0], -1) for t in (v, q, k)], 1)
    parts = [part.view(-1, 3, 64).requires_grad_() for part in whole.split(192, 1)]
    odd = [torch.nn.functional.pad(t.detach(), (0, 1))[..., :64].requires_grad_() for t in (q, k, v)]
    turned = [t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in (q, k, v)]
    want = results(layout, q, k, v, None, AttentionMask(), "sm90")
    for given in ([parts[1], parts[2], parts[0]], odd, turned):
        got = results(layout, *given, None, AttentionMask(), "sm90")
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dim", WIDTHS)
def test_deterministic_gradients_have_the_same_bits_every_time(dim):
    batch = case([(700, 3), (0, 1), (33, 0)] * 20, 2, dim, dim, 2, torch.bfloat16)
    want, *others = (results(*batch, AttentionMask(), "sm90", True) for _ in range(5))
    for got in others:
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


class Attention(torch.nn.Module):
    """What a compiler sees: lengths are inputs."""

    def __init__(self, deterministic):
        super().__init__()
        self.deterministic = deterministic

    def forward(self, q, k, v, lengths, offsets, num_targets):
        layout = SequenceLayout.trusted(lengths, offsets, num_targets, 2, q.shape[0], q.shape[0], q.shape[0])
        out = hstu_attention(
            q * 1.0, k, v, layout, scale_len=64, backend="sm90", deterministic=self.deterministic
        )
        return out * 2.0


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_graph_for_all_sizes(deterministic):
    """And one for each width: the code for one is in PyTorch's cache on disk when the other is compiled."""
    for dim in (64, 256, 64):
        check_graph(dim, deterministic)


def check_graph(dim, deterministic):
    torch.compiler.reset()  # the limit of recompilations counts those of the other parameters too
    model = Attention(deterministic)
    made = torch.compile(model, dynamic=True, fullgraph=True)
    for shapes in ([(70, 3), (5, 0)], [(3, 1)], [(400, 9), (0, 2), (33, 0)], [(900, 5)] * 40):
        layout, q, k, v, _ = case(shapes, 2, dim, dim, 2, torch.bfloat16)
        batch = (q, k, v, layout.lengths, layout.offsets, layout.num_targets)
        results_of = []
        for run in (made, model):
            out = run(*batch)
            cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
            results_of.append([out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent)])
        for got, want in zip(*results_of, strict=True):
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-5)  # dQ: sums in any order
