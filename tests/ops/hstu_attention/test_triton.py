"""The Triton kernels of `hstu_attention`: numbers, repeatability, sizes in any order, graphs.

The same tests run in the interpreter on a CPU and on a GPU, where they are also run with large inputs.
"""

import random
from typing import NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.fx.experimental import _config as fx_config

from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, explain, hstu_attention, last_backend
from recsys.ops.hstu_attention.triton.block_sizes import Blocks
from recsys.ops.relative_bias import time_bucket
from tests.ops import harness, oracle
from tests.ops.attention import assert_near, case, results, times_of
from tests.ops.cases import MASKS, layout_of, qkv, relative_bias, samples
from tests.ops.harness import Runner, runners
from tests.tools.interpreter import INTERPRETED, WithNumbersOnly, between_poison, interpreted

# Tiles of rows and keys in several sizes: inside a tile, over several, odd, no history, no targets, empty.
SHAPES = [(9, 5), (0, 3), (0, 0), (23, 0), (2, 9)]
DEVICE = "cuda"

everywhere = pytest.mark.parametrize("runner", runners("triton"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles a sample, several blocks a tile, of different sizes in either direction."""
    if not INTERPRETED:
        return
    from recsys.ops.hstu_attention.triton import launch as triton_launch

    sizes = {"forward": Blocks(16, 8, 4, 1), "keys": Blocks(8, 16, 4, 1), "rows": Blocks(8, 8, 4, 1)}
    sizes |= {"grad_k": Blocks(8, 8, 4, 1), "grad_v": sizes["keys"], "tables": Blocks(16, 8, 4, 1)}
    monkeypatch.setattr(triton_launch, "blocks_of", lambda kernel, *_: sizes[kernel])


class Options(NamedTuple):
    """Further options of a call."""

    dim: int = 3
    v_dim: int = 2
    heads: int = 1
    bias_rows: int | None = 0  # None: one table for all heads; 0: no bias
    alpha: float | None = None
    times: str | None = None  # a kind of `times_of`


PLAIN = Options()


def check(runner: Runner, batch, mask, options=PLAIN, *, loops=False):
    """Output and all gradients, for random cotangents, against float64: the reference, or the loops."""
    layout = layout_of(batch)
    exact = qkv(layout.total_len, heads=options.heads, dim=options.dim, v_dim=options.v_dim)

    def placed(tensor):
        tensor = tensor.detach().to(runner.device)
        return between_poison(tensor) if runner.is_interpreted else tensor

    inputs = [placed(tensor.float()).requires_grad_() for tensor in exact]
    leaves, wanted, bias, exact_bias = list(inputs), list(exact), None, None
    if options.bias_rows != 0:
        exact_bias = relative_bias(layout.total_len, rows=options.bias_rows)
        tables = [exact_bias.position_table, exact_bias.time_table]
        if options.times is not None:
            times = times_of(options.times, layout.total_len)
            exact_bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60]))
        wanted += tables
        leaves += [table.detach().float().to(runner.device).requires_grad_() for table in tables]
        bias = RelativeBias(*leaves[3:], *map(placed, (exact_bias.timestamps, exact_bias.next_timestamps)))
    arguments = {"alpha": options.alpha, "scale_len": 7}
    out = hstu_attention(
        *inputs, layout.to(runner.device), mask, **arguments, bias=bias, backend=runner.backend
    )
    assert last_backend("hstu_attention") == runner.backend
    if loops:
        alpha = options.dim**-0.5 if options.alpha is None else options.alpha
        expected = oracle.hstu(*exact, batch, mask, alpha, 7, exact_bias)
    else:
        expected = hstu_attention(*exact, layout, mask, **arguments, bias=exact_bias, backend="reference")
    # Products in three passes of TF32 on a GPU are not as near as the interpreter's.
    close = 2e-5 if runner.is_interpreted else 1e-4
    torch.testing.assert_close(out.double().cpu(), expected, rtol=close, atol=close)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(out, leaves, placed(cotangent.float()))
    want = torch.autograd.grad(expected, wanted, cotangent)
    for one, other in zip(got, want, strict=True):
        assert (one.cpu() - other).norm() <= close / 2 * max(1.0, other.norm())
        torch.testing.assert_close(one.double().cpu(), other, rtol=10 * close, atol=10 * close)


@everywhere
@pytest.mark.parametrize(("mask", "contextual"), list(zip(MASKS[1::5], [0, 3] * 5, strict=True)), ids=str)
def test_output_and_gradients(mask, contextual, runner):
    check(runner, samples(contextual, SHAPES), mask)


@everywhere
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[3::9], [None, 2] * 3, strict=False)), ids=str)
def test_bias_and_the_gradients_of_its_tables(mask, rows, runner):
    check(runner, samples(1, SHAPES[:4]), mask, Options(heads=rows or 1, bias_rows=rows))


@everywhere
@pytest.mark.parametrize("kind", ["hours", "minutes", "equal", "anywhere", "backward"])
def test_times_near_and_far_in_any_order(kind, runner):
    """Few buckets in a block of scores, many, and differences that are not exact in float32."""
    check(runner, samples(1, [(35, 4), (2, 0)]), AttentionMask(), Options(bias_rows=1, times=kind))


@interpreted
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(30, 5)], ids=str)
def test_tables_by_several_workers_near_the_diagonal_and_far_from_it(mask, monkeypatch):
    from recsys.ops.hstu_attention.bias import table_kernels
    from recsys.ops.hstu_attention.triton import launch as triton_launch

    monkeypatch.setattr(triton_launch, "num_processors", lambda device: 3)
    monkeypatch.setattr(triton_launch, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(table_kernels, "NEAR_TILES", 1)
    check(Runner("triton", "cpu"), samples(0, [(60, 3), (37, 0)]), mask, Options(bias_rows=1))


@everywhere
@pytest.mark.parametrize("mask", [AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)], ids=str)
def test_against_the_loops(mask, runner):
    """The other definition, with groups longer than a tile and with history of every length."""
    check(runner, samples(2, [(1, 13), (7, 0), (9, 3)]), mask, Options(bias_rows=1), loops=True)


@everywhere
@pytest.mark.parametrize(("dim", "v_dim", "alpha"), [(16, 5, 0.0), (24, 16, -0.7), (1, 33, None)])
def test_other_dimensions_and_alphas(dim, v_dim, alpha, runner):
    check(runner, samples(0, SHAPES[:3]), AttentionMask(), Options(dim, v_dim, 3, alpha=alpha))


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
    layout = layout_of(samples(1, SHAPES[::-1]))
    inputs = [t.detach().float().requires_grad_() for t in qkv(layout.total_len)]
    with harness.guarded_memory(monkeypatch) as buffers:
        out = hstu_attention(*inputs, layout, scale_len=7, backend="triton")
        torch.autograd.grad(out, inputs, torch.ones(out.shape))
    assert len(buffers) >= 4


@everywhere
def test_views_of_one_projection_and_a_transposed_gradient(runner):
    layout = layout_of(samples(1, SHAPES)).to(runner.device)
    joint = torch.randn(layout.total_len, 2, 8).to(runner.device).requires_grad_()
    outs = [
        hstu_attention(*joint.split([3, 3, 2], dim=2), layout, scale_len=8, backend=backend)
        for backend in ("triton", "reference")
    ]
    cotangent = torch.randn(2, 2, layout.total_len).to(runner.device).permute(2, 1, 0)
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
    """Schemas, shapes without numbers, gradients: a compiler relies on them. D != V, a strided input."""
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


test_the_kernels_in_the_interpreter = harness.interpreter_test(__file__)


class Variant(NamedTuple):
    """Facts that kernels are compiled for."""

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


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@hypothesis.settings(max_examples=20)
@hypothesis.given(data=st.data())
def test_random_layouts(variant, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 70)), min_size=1, max_size=5))
    contextual = data.draw(st.sampled_from([0, 1, 6]))
    arguments = case(shapes, contextual, variant.dim, variant.v_dim, 2, variant.dtype, variant.bias_rows)
    deterministic = data.draw(st.booleans())
    assert_near(results(*arguments, variant.mask, "triton", deterministic), arguments, variant.mask)


@pytest.mark.gpu
@pytest.mark.parametrize("bias_rows", [0, 2])
def test_deterministic_means_the_same_bits(bias_rows):
    arguments = case([(900, 60), (5, 0), (2000, 9)], 3, 64, 64, 2, torch.bfloat16, bias_rows)
    first = results(*arguments, AttentionMask(), "triton")
    for _ in range(5):
        again = results(*arguments, AttentionMask(), "triton")
        harness.assert_equal(again, first)


@pytest.mark.gpu
def test_other_sizes_in_any_order_use_one_artefact_and_stay_right():
    from recsys.ops.hstu_attention.triton.forward import forward_kernel

    sizes = [[(n, 0)] for n in (1, 7, 512, 2048, 4097)]
    batches = [case(shapes, 0, 64, 64, 2, torch.bfloat16) for shapes in sizes]
    expected = [results(*batch, AttentionMask(), "triton") for batch in batches]
    for batch, got in zip(batches, expected, strict=True):
        assert_near(got, batch, AttentionMask())
    before = harness.artefacts(forward_kernel)
    order = [i for n in range(40) for i in (4, n % 4, 0, 3, 1)]
    rapid = [(i, results(*batches[i], AttentionMask(), "triton")) for i in order]
    torch.cuda.synchronize()
    for i, got in rapid:
        harness.assert_equal(got, expected[i])
    assert harness.artefacts(forward_kernel) == before


@pytest.mark.gpu
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
        harness.assert_equal(got, clean)
    finally:
        torch.use_deterministic_algorithms(False)


class Attention(torch.nn.Module):
    """Attention as a compiler sees it: lengths are inputs."""

    def forward(self, q, k, v, lengths, offsets, num_targets):
        layout = SequenceLayout.trusted(lengths, offsets, num_targets, 0, q.shape[0], q.shape[0], q.shape[0])
        return hstu_attention(q, k, v, layout, AttentionMask(window=40), scale_len=64, backend="triton")


@pytest.mark.gpu
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
