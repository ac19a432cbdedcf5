"""The Triton kernel of `hstu_attention_cached` on a CPU: numbers, not code generation."""

import pytest
import torch

from recsys.ops import (
    AttentionMask,
    CachedRelativeBias,
    SequenceLayout,
    explain,
    hstu_attention,
    hstu_attention_cached,
    last_backend,
)
from recsys.ops.hstu_attention.triton.block_sizes import Blocks
from tests.ops import oracle
from tests.ops.cases import MASKS, Cut, cut, layout_of, qkv, relative_bias, samples
from tests.tools.interpreter import (
    INTERPRETED,
    WithNumbersOnly,
    between_poison,
    interpreted,
    mend_interpreter,
    run_interpreted,
    starts_it,
)

# Caches and new tokens inside a tile, over several, odd, empty; the last sample has nothing new.
SHAPES = [(29, 5), (0, 3), (0, 0), (23, 0), (12, 19), (9, 0)]
CUTS = {"ragged": [13, 0, 0, 22, 12, 9], "nothing cached": [0] * 6, "all cached": [99] * 6}
GUARD = 777.0


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles a sample, several blocks a tile."""
    if not INTERPRETED:
        return
    from recsys.ops.hstu_attention.cached import triton_ops

    mend_interpreter(monkeypatch)
    monkeypatch.setattr(triton_ops, "blocks_for", lambda *_: Blocks(16, 8, 4, 1))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that PyTorch hands out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def in_float32(parts: Cut, inputs, bias):
    """Arguments for the kernel: float32, between rows of poison."""
    arguments = [
        value if isinstance(value, SequenceLayout) else between_poison(value.float())
        for value in parts.arguments(*inputs)
    ]
    if bias is not None:
        exact = parts.bias(bias)
        tables = (exact.position_table.float(), exact.time_table.float())
        times = (exact.timestamps, exact.next_timestamps, exact.cache_timestamps)
        bias = CachedRelativeBias(*tables, *map(between_poison, times))
    return arguments, bias


def check(batch, num_cached, mask, *, dim=3, v_dim=2, heads=1, bias_rows=0, alpha=None, loops=False):
    """Against float64: the reference of whole samples, or the loops."""
    whole, parts = layout_of(batch), cut(batch, num_cached)
    inputs = [tensor.detach() for tensor in qkv(whole.total_len, heads=heads, dim=dim, v_dim=v_dim)]
    bias = relative_bias(whole.total_len, rows=bias_rows) if bias_rows != 0 else None
    arguments, new_bias = in_float32(parts, inputs, bias)
    out = hstu_attention_cached(*arguments, mask, alpha=alpha, scale_len=7, bias=new_bias, backend="triton")
    assert last_backend("hstu_attention_cached") == "triton"
    if loops:
        expected = oracle.hstu(*inputs, batch, mask, dim**-0.5 if alpha is None else alpha, 7, bias)
    else:
        expected = hstu_attention(
            *inputs, whole, mask, alpha=alpha, scale_len=7, bias=bias, backend="reference"
        )
    torch.testing.assert_close(out.double(), parts.new(expected), rtol=2e-5, atol=2e-5)


@interpreted
@pytest.mark.parametrize("num_cached", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("mask", "contextual"), list(zip(MASKS[1::5], [0, 3] * 5, strict=True)), ids=str)
def test_new_tokens_get_their_rows_of_the_whole(mask, contextual, num_cached):
    check(samples(contextual, SHAPES), num_cached, mask)


@interpreted
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[3::9], [None, 2] * 3, strict=False)), ids=str)
def test_bias(mask, rows):
    check(samples(1, SHAPES), CUTS["ragged"], mask, heads=rows or 1, bias_rows=rows)


@interpreted
@pytest.mark.parametrize("mask", [AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)], ids=str)
def test_against_the_loops(mask):
    """By the other definition, with groups that are longer than a tile."""
    check(samples(2, [(21, 13), (7, 0), (9, 3)]), [17, 3, 9], mask, bias_rows=1, loops=True)


@interpreted
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[1::6], [0, 2, None] * 3, strict=False)), ids=str)
def test_keys_in_parts(mask, rows, parts, monkeypatch):
    """Parts of several blocks, of one and of none; sums that nobody has written would be NaN."""
    from recsys.ops.hstu_attention.cached import triton_ops

    monkeypatch.setattr(triton_ops, "num_parts", lambda *_: parts)
    batch, num_cached = samples(2, [(45, 5), *SHAPES]), [43, *CUTS["ragged"]]
    check(batch, num_cached, mask, heads=2, bias_rows=rows)


@interpreted
@pytest.mark.parametrize(("dim", "v_dim", "alpha"), [(16, 5, 0.0), (24, 16, -0.7), (1, 33, None)])
def test_other_dimensions_and_alphas(dim, v_dim, alpha):
    check(samples(0, SHAPES), CUTS["ragged"], AttentionMask(), dim=dim, v_dim=v_dim, heads=3, alpha=alpha)


@interpreted
def test_float16():
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    batch, mask = samples(3, SHAPES), AttentionMask(5, 4, True, 3)
    parts = cut(batch, CUTS["ragged"])
    half = [t.detach().half() for t in qkv(sum(sample.length for sample in batch), dim=16, v_dim=7)]
    ours, theirs, exact = (
        hstu_attention_cached(*parts.arguments(*inputs), mask, scale_len=64, backend=backend)
        for backend, inputs in (
            ("triton", half),
            ("reference", half),
            ("reference", [tensor.double() for tensor in half]),
        )
    )
    assert ours.dtype == torch.float16
    assert (ours.double() - exact).norm() < 2 * (theirs.double() - exact).norm()


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    buffers = []

    def guarded(like, **_):
        buffers.append(torch.full((like.numel() + 999,), GUARD, dtype=like.dtype))
        return buffers[-1][: like.numel()].view(like.shape)

    monkeypatch.setattr(torch, "empty_like", guarded)
    batch = samples(1, SHAPES[::-1])
    parts = cut(batch, CUTS["ragged"][::-1])
    inputs = [t.detach().float() for t in qkv(sum(sample.length for sample in batch))]
    hstu_attention_cached(*parts.arguments(*inputs), scale_len=7, backend="triton")
    (buffer,) = buffers
    assert (buffer[-999:] == GUARD).all() and not (buffer[:-999] == GUARD).any()


@interpreted
def test_views_are_taken_as_they_are():
    """New rows of one projection, and a cache that lies with its heads outside of its rows."""
    batch = samples(1, SHAPES)
    parts = cut(batch, CUTS["ragged"])
    q, k, v = torch.randn(parts.layout.total_len, 2, 8).split([3, 3, 2], dim=2)
    cache = torch.randn(2, parts.cache_layout.total_len, 5).transpose(0, 1).split([3, 2], dim=2)
    ours, theirs = (
        hstu_attention_cached(q, k, v, parts.layout, *cache, parts.cache_layout, scale_len=8, backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_tokens(lengths):
    layout = SequenceLayout(torch.tensor(lengths, dtype=torch.int64))
    q, k, v = (t.detach().float() for t in qkv(0))
    out = hstu_attention_cached(q, k, v, layout, k, v, layout, scale_len=4, backend="triton")
    assert out.shape == (0, 2, 2)


@interpreted
def test_a_sample_with_nan_spoils_no_other():
    batch = samples(1, [(14, 1), (9, 2), (5, 2)])
    parts = cut(batch, [3, 5, 5])
    inputs = [tensor.detach().float() for tensor in qkv(sum(sample.length for sample in batch))]
    clean = hstu_attention_cached(*parts.arguments(*inputs), scale_len=8, backend="triton")
    for tensor in inputs:
        tensor[16:28] = float("nan")
    out = hstu_attention_cached(*parts.arguments(*inputs), scale_len=8, backend="triton")
    assert torch.equal(out[:12], clean[:12]) and torch.equal(out[18:], clean[18:])
    assert out[12:18].isnan().all()


@interpreted
def test_the_library_op(monkeypatch):
    """What a compiler relies on: its schema, shapes without numbers; with D != V and a strided input."""
    from recsys.ops.hstu_attention.cached import triton_ops

    monkeypatch.setattr(SequenceLayout, "host_copy", None)  # as if the lengths were on a device
    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    for batch in (samples(1, SHAPES), samples(1, [(0, 0)])):
        parts = cut(batch, CUTS["ragged"][: len(batch)])
        inputs = [t.detach().float() for t in qkv(sum(sample.length for sample in batch), dim=3, v_dim=5)]
        q, k, v, layout, cache_k, cache_v, cached = parts.arguments(*inputs)
        bias = parts.bias(relative_bias(sum(sample.length for sample in batch), rows=2))
        tables = (bias.position_table.float(), bias.time_table.float(), bias.timestamps)
        times = (bias.next_timestamps, bias.cache_timestamps)
        lengths = (layout.lengths, layout.offsets, layout.num_targets, cached.lengths, cached.offsets)
        for more in ((*tables, *times), (None,) * 5):
            arguments = (q, k.transpose(0, 1).contiguous().transpose(0, 1), v, cache_k, cache_v, *lengths)
            torch.library.opcheck(
                triton_ops.hstu_attention_cached_triton,
                (*arguments, *more, 1, 3, 2, False, 2, True, 0.5, 8.0),
                test_utils=("test_schema", "test_faketensor"),
            )


@interpreted
def test_auto_stays_with_the_reference_on_a_cpu():
    parts = cut(samples(0, [(3, 1)]), [2])
    arguments = parts.arguments(*(tensor.detach().float() for tensor in qkv(4)))
    hstu_attention_cached(*arguments, scale_len=1)
    assert last_backend("hstu_attention_cached") == "reference"
    assert dict(explain("hstu_attention_cached", *arguments, scale_len=1).rows)["triton"].ok


@starts_it
def test_the_kernel_in_the_interpreter():
    run_interpreted(__file__)
