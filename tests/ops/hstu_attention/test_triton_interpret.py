"""The Triton kernels of `hstu_attention` on a CPU: numbers, not code generation."""

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, explain, hstu_attention, last_backend
from recsys.ops.hstu_attention.triton.block_sizes import Blocks
from recsys.ops.relative_bias import time_bucket
from tests.ops import oracle
from tests.ops.cases import MASKS, layout_of, qkv, relative_bias, samples
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)

# Tiles of rows and keys in several sizes: inside a tile, over several, odd, no history, no targets, empty.
SHAPES = [(9, 5), (0, 3), (0, 0), (23, 0), (2, 9)]
GUARD = 777.0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles a sample, several blocks a tile, of different sizes in either direction."""
    if not INTERPRETED:
        return
    from recsys.ops.hstu_attention.triton import launch as triton_launch

    mend_interpreter(monkeypatch)
    sizes = {"forward": Blocks(16, 8, 4, 1), "keys": Blocks(8, 16, 4, 1), "rows": Blocks(8, 8, 4, 1)}
    sizes |= {"grad_k": Blocks(8, 8, 4, 1), "grad_v": sizes["keys"], "tables": Blocks(16, 8, 4, 1)}
    monkeypatch.setattr(triton_launch, "blocks_of", lambda kernel, *_: sizes[kernel])


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(batch, mask, *, dim=3, v_dim=2, heads=1, bias_rows=0, alpha=None, loops=False):
    """Output and all gradients, for random cotangents, against float64: the reference, or the loops."""
    layout = layout_of(batch)
    exact = qkv(layout.total_len, heads=heads, dim=dim, v_dim=v_dim)
    inputs = [between_poison(tensor.detach().float()).requires_grad_() for tensor in exact]
    leaves, wanted, bias, exact_bias = list(inputs), list(exact), None, None
    if bias_rows != 0:
        exact_bias = relative_bias(layout.total_len, rows=bias_rows)
        tables = [exact_bias.position_table, exact_bias.time_table]
        wanted += tables
        leaves += [table.detach().float().requires_grad_() for table in tables]
        times = map(between_poison, (exact_bias.timestamps, exact_bias.next_timestamps))
        bias = RelativeBias(*leaves[3:], *times)
    arguments = {"alpha": alpha, "scale_len": 7}
    out = hstu_attention(*inputs, layout, mask, **arguments, bias=bias, backend="triton")
    assert last_backend("hstu_attention") == "triton"
    if loops:
        expected = oracle.hstu(*exact, batch, mask, dim**-0.5 if alpha is None else alpha, 7, exact_bias)
    else:
        expected = hstu_attention(*exact, layout, mask, **arguments, bias=exact_bias, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(out, leaves, between_poison(cotangent.float()))
    want = torch.autograd.grad(expected, wanted, cotangent)
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-5 * max(1.0, other.norm())
        torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-4)


@interpreted
@pytest.mark.parametrize(("mask", "contextual"), list(zip(MASKS[1::5], [0, 3] * 5, strict=True)), ids=str)
def test_output_and_gradients(mask, contextual):
    check(samples(contextual, SHAPES), mask)


@interpreted
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[3::9], [None, 2] * 3, strict=False)), ids=str)
def test_bias_and_the_gradients_of_its_tables(mask, rows):
    check(samples(1, SHAPES[:4]), mask, heads=rows or 1, bias_rows=rows)


def times_of(kind, total_len):
    """Histories as they come, and such as none should be."""
    generator = torch.Generator().manual_seed(3)
    part = torch.rand(total_len, generator=generator, dtype=torch.float64)
    return {
        "in order": lambda: 1_763_000_000 + (9 * part).exp().to(torch.int64).cumsum(0),
        "far from anything, a minute apart": lambda: 60 * torch.arange(total_len) - 2**33,
        "equal": lambda: torch.full((total_len,), 1_763_000_000),
        "anywhere": lambda: (part * 2**40).to(torch.int64) - 2**39,
        "backward": lambda: 2**34 - (part * 2**26).to(torch.int64).cumsum(0),
    }[kind]()


@interpreted
@pytest.mark.parametrize(
    "kind", ["in order", "far from anything, a minute apart", "equal", "anywhere", "backward"]
)
def test_times_near_and_far_in_any_order(kind, monkeypatch):
    """Few buckets in a block of scores, many, and differences that are not exact in float32."""
    with_tables = relative_bias

    def biased(total_len, *, rows, seed=0):
        times = times_of(kind, total_len)
        tables = with_tables(total_len, rows=rows, seed=seed)
        return RelativeBias(
            tables.position_table, tables.time_table, times, torch.cat([times[1:], times[-1:] + 60])
        )

    monkeypatch.setitem(globals(), "relative_bias", biased)
    check(samples(1, [(35, 4), (2, 0)]), AttentionMask(), bias_rows=1)


@interpreted
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(30, 5)], ids=str)
def test_tables_by_several_workers_near_the_diagonal_and_far_from_it(mask, monkeypatch):
    from recsys.ops.hstu_attention.bias import table_kernels
    from recsys.ops.hstu_attention.triton import launch as triton_launch

    monkeypatch.setattr(triton_launch, "num_processors", lambda device: 3)
    monkeypatch.setattr(triton_launch, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(table_kernels, "NEAR_TILES", 1)
    check(samples(0, [(60, 3), (37, 0)]), mask, bias_rows=1)


@interpreted
@pytest.mark.parametrize("mask", [AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)], ids=str)
def test_against_the_loops(mask):
    """By the other definition, with groups that are longer than a tile and with history of every length."""
    batch = samples(2, [(1, 13), (7, 0), (9, 3)])
    check(batch, mask, bias_rows=1, loops=True)


@interpreted
@pytest.mark.parametrize(("dim", "v_dim", "alpha"), [(16, 5, 0.0), (24, 16, -0.7), (1, 33, None)])
def test_other_dimensions_and_alphas(dim, v_dim, alpha):
    check(samples(0, SHAPES[:3]), AttentionMask(), dim=dim, v_dim=v_dim, heads=3, alpha=alpha)


@interpreted
@pytest.mark.parametrize("keys_kernels", [("keys",), ("grad_v", "grad_k")], ids=len)
@pytest.mark.parametrize("mask", [MASKS[0], AttentionMask(5, 4, True, 3)], ids=str)
def test_float16_with_one_kernel_for_keys_and_with_two(mask, keys_kernels, monkeypatch):
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    from recsys.ops.hstu_attention.triton import launch as triton_launch

    monkeypatch.setattr(triton_launch, "keys_kernels", lambda *_: keys_kernels)
    layout = layout_of(samples(3, SHAPES))
    inputs = [t.detach().half().requires_grad_() for t in qkv(layout.total_len, heads=1, dim=16, v_dim=7)]
    cotangent = torch.randn(layout.total_len, 1, 7, dtype=torch.float16)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    for backend, leaves in (("triton", inputs), ("reference", inputs), ("reference", exact)):
        out = hstu_attention(*leaves, layout, mask, scale_len=64, backend=backend)
        assert out.dtype == leaves[0].dtype
        results.append([out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype))])
    for ours, theirs, want in zip(*results, strict=True):
        assert (ours.double() - want).norm() < 2 * (theirs.double() - want).norm()


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    buffers = []

    def guarded(like, **_):
        buffers.append(torch.full((like.numel() + 999,), GUARD, dtype=like.dtype))
        return buffers[-1][: like.numel()].view(like.shape)

    monkeypatch.setattr(torch, "empty_like", guarded)
    layout = layout_of(samples(1, SHAPES[::-1]))
    inputs = [t.detach().float().requires_grad_() for t in qkv(layout.total_len)]
    out = hstu_attention(*inputs, layout, scale_len=7, backend="triton")
    torch.autograd.grad(out, inputs, torch.ones(out.shape))
    assert len(buffers) >= 4
    for buffer in buffers:
        assert (buffer[-999:] == GUARD).all() and not (buffer[:-999] == GUARD).any()


@interpreted
def test_views_of_one_projection_and_a_transposed_gradient():
    layout = layout_of(samples(1, SHAPES))
    joint = torch.randn(layout.total_len, 2, 8, requires_grad=True)
    outs = [
        hstu_attention(*joint.split([3, 3, 2], dim=2), layout, scale_len=8, backend=backend)
        for backend in ("triton", "reference")
    ]
    cotangent = torch.randn(2, 2, layout.total_len).permute(2, 1, 0)
    got, want = (torch.autograd.grad(out, joint, cotangent)[0] for out in outs)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_tokens(lengths):
    layout = SequenceLayout(torch.tensor(lengths, dtype=torch.int64))
    bias = relative_bias(0, rows=2)
    inputs = [t.detach().float().requires_grad_() for t in qkv(0)]
    out = hstu_attention(*inputs, layout, scale_len=4, bias=bias, backend="triton")
    assert out.shape == (0, 2, 2)
    for gradient in torch.autograd.grad(out.sum(), [*inputs, bias.position_table, bias.time_table]):
        assert not gradient.any()


@interpreted
def test_scores_as_large_as_they_get_are_masked_and_finite():
    layout = SequenceLayout(torch.tensor([2]))
    q = torch.full((2, 1, 1), 3e4, requires_grad=True)
    k = torch.tensor([-1.0, 1e15]).view(2, 1, 1).requires_grad_()
    v = torch.ones(2, 1, 1, requires_grad=True)
    out = hstu_attention(q, k, v, layout, alpha=1.0, scale_len=1, backend="triton")
    assert out[0].item() == 0.0 and out[1].item() == pytest.approx(3e19)
    for gradient in torch.autograd.grad(out[0], (q, k, v)):
        assert not gradient.any()


@interpreted
def test_a_sample_with_nan_spoils_no_other():
    layout = layout_of(samples(0, [(4, 1), (9, 0), (5, 2)]))
    inputs = [t.detach().float() for t in qkv(layout.total_len)]
    clean = hstu_attention(*inputs, layout, scale_len=8, backend="triton")
    for tensor in inputs:
        tensor[5:14] = float("nan")
    out = hstu_attention(*inputs, layout, scale_len=8, backend="triton")
    assert torch.equal(out[:5], clean[:5]) and torch.equal(out[14:], clean[14:])


@interpreted
@pytest.mark.parametrize("shapes", [SHAPES, [(0, 0)]])
def test_the_library_ops(shapes, monkeypatch):
    """What a compiler relies on: schemas, shapes without numbers, gradients; D != V, a strided input."""
    from recsys.ops.hstu_attention.triton import ops

    monkeypatch.setattr(ops, "wrap_triton", WithNumbersOnly)
    monkeypatch.setattr(SequenceLayout, "host_copy", None)  # as if the lengths were on a device
    layout = layout_of(samples(0, shapes))
    q, k, v = (t.detach().float() for t in qkv(layout.total_len, heads=2, dim=3, v_dim=5))
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    bias = relative_bias(layout.total_len, rows=2)
    tables = [table.detach().float() for table in (bias.position_table, bias.time_table)]
    for more in ((*tables, bias.timestamps, bias.next_timestamps), (None,) * 4):
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        lengths = (layout.lengths, layout.offsets, layout.num_targets)
        rest = (*lengths, *more, 0, 3, 2, False, 2, True, 0.5, 8.0, True)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ops.hstu_attention_triton, (*leaves, *rest), test_utils=checks)
        arguments = (torch.randn(v.shape), *(leaf.detach() for leaf in leaves), *rest)
        torch.library.opcheck(
            ops.hstu_attention_triton_backward,
            arguments,
            test_utils=("test_schema", "test_faketensor"),
        )


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu():
    layout = SequenceLayout(torch.tensor([3]))
    q = torch.zeros(3, 1, 4)
    hstu_attention(q, q, q, layout, scale_len=1)
    assert last_backend("hstu_attention") == "reference"
    assert dict(explain("hstu_attention", q, q, q, layout, scale_len=1).rows)["triton"].ok


@interpreted
def test_edges_of_time_buckets_are_those_of_the_definition():
    from recsys.ops.hstu_attention.bias.launch import time_edges

    edges = time_edges(100)
    assert edges[0] == 1 and edges[-1] == 2**63 - 1 and len(edges) == 101
    for bucket, edge in enumerate(edges[1:-1], start=1):
        before, at = time_bucket(torch.tensor([edge - 1, edge]), 100).tolist()
        assert before < bucket <= at


@starts_it
def test_the_kernels_in_the_interpreter():
    run_interpreted(__file__)
