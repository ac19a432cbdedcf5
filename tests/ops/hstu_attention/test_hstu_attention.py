"""`hstu_attention`: the reference against loops over queries and keys, kernels against the reference in
float64, and the properties that a model relies on. What only a GPU can show is in `test_on_gpus.py`."""

import dataclasses

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import AttentionMask, RelativeBias, SequenceLayout, hstu_attention
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.hstu_attention import reference
from recsys.ops.hstu_attention.block_sizes import Blocks
from recsys.ops.relative_bias import time_bucket
from tests.ops import cases, harness
from tests.ops.attention import BIAS, by_loops, problem
from tests.ops.cases import MASKS, layout_of, qkv, relative_bias, samples
from tests.ops.harness import REFERENCE, Runner, assert_close, assert_is, runners
from tests.ops.oracle import Sample
from tests.tools.interpreter import INTERPRETED, WithNumbersOnly, interpreted

INTERPRETER = Runner("triton", "cpu")
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64, sums in another order

# Tiles of rows and keys in several sizes: inside a tile, over several, odd, no history, no targets, empty.
SHAPES = [(9, 5), (0, 3), (0, 0), (23, 0), (2, 9)]

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))
by_kernels = pytest.mark.parametrize("runner", runners("triton"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles a sample, several blocks a tile, of different sizes in either direction."""
    if not INTERPRETED:
        return
    from recsys.ops.hstu_attention import triton as triton_launch

    sizes = {"forward": Blocks(16, 8, 4, 1), "keys": Blocks(8, 16, 4, 1), "rows": Blocks(8, 8, 4, 1)}
    sizes |= {"grad_k": Blocks(8, 8, 4, 1), "grad_v": sizes["keys"], "tables": Blocks(16, 8, 4, 1)}
    monkeypatch.setattr(triton_launch, "blocks_for", lambda kernel, *_: sizes[kernel])


def check(given, runner):
    """Output and all gradients: of the reference those of the loops, of kernels those of the reference, in
    float64."""
    if runner == REFERENCE:
        return assert_is(given, by_loops, close=1e-12)
    (out, *grads), (exact, *wanted) = (
        harness.results(given.cast(torch.float32), runner),
        harness.results(given, REFERENCE),
    )
    # Products in three passes of TF32 on a GPU are not as near as the interpreter's.
    close = 2e-5 if runner.is_interpreted else 1e-4
    assert_close([out], [exact], close)
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad.cpu() - want).norm() <= close / 2 * max(1.0, want.norm())
    assert_close(grads, wanted, 10 * close)


@pytest.mark.parametrize(
    ("mask", "contextual"),
    [(mask, (0, 1, 3)[(i // 4 + i) % 3]) for i, mask in enumerate(MASKS)],
    ids=str,
)
def test_the_reference_is_the_loops(mask, contextual):
    """All masks, and each pair of a setting of the mask and a number of contextual tokens."""
    check(problem(cases.SHAPES, contextual, mask, heads=2, bias_rows=[None, 2][contextual % 2]), REFERENCE)


@by_kernels
@pytest.mark.parametrize(("mask", "contextual"), list(zip(MASKS[1::7], [0, 3] * 4, strict=False)), ids=str)
def test_output_and_gradients(mask, contextual, runner):
    check(problem(SHAPES, contextual, mask), runner)


@by_kernels
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[15:28:12], [2, None], strict=True)), ids=str)
def test_bias_and_the_gradients_of_its_tables(mask, rows, runner):
    check(problem(SHAPES[:4], 1, mask, heads=rows or 1, bias_rows=rows), runner)


@by_kernels
@pytest.mark.parametrize("kind", ["hours", "minutes", "equal", "anywhere", "backward"])
def test_times_near_and_far_in_any_order(kind, runner):
    """Few buckets in a block of scores, many, and differences that are not exact in float32."""
    check(problem([(17, 3), (2, 0)], 1, bias_rows=1, times=kind), runner)


@interpreted
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(30, 5)], ids=str)
def test_tables_by_several_workers_near_the_diagonal_and_far_from_it(mask, monkeypatch):
    from recsys.ops.hstu_attention import triton as triton_launch
    from recsys.ops.hstu_attention.bias import table_kernels

    monkeypatch.setattr(triton_launch, "num_processors", lambda device: 3)
    monkeypatch.setattr(triton_launch, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(table_kernels, "NEAR_TILES", 1)
    check(problem([(38, 3), (17, 0)], 0, mask, bias_rows=1), INTERPRETER)


@everywhere
@pytest.mark.parametrize("mask", [AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)], ids=str)
def test_groups_longer_than_a_tile(mask, runner):
    check(problem([(1, 13), (7, 0), (9, 3)], 2, mask, bias_rows=1), runner)


@everywhere
def test_contextual_tokens_of_several_tiles(runner):
    """Those that do not read the history see later contextual tokens all the same, in other tiles too."""
    mask = AttentionMask(contextual_reads_history=False)
    check(problem([(3, 0), (0, 0)], 24 if runner.device == "cpu" else 300, mask, bias_rows=1), runner)


@everywhere
@pytest.mark.parametrize(
    ("dims", "alpha"), [((16, 5), 0.0), ((24, 16), -0.7), ((1, 33), None), ((3, 5), None), ((1, 1), -0.7)]
)
def test_other_dimensions_and_alphas(dims, alpha, runner):
    check(problem(SHAPES[:3], heads=3, dims=dims, alpha=alpha), runner)


@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("window", [None, 2])
def test_samples_without_targets_are_the_loops(window, reads, contextual):
    """One mask and one table of distances serve all such samples, unless contextual tokens read histories."""
    mask = AttentionMask(window, contextual_reads_history=reads)
    check(problem([(5, 0), (0, 0), (1, 0), (7, 0)], contextual, mask, heads=2, bias_rows=2), REFERENCE)


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_random_layouts_are_the_loops(data):
    sizes = st.tuples(st.integers(0, 6), st.integers(0, 4))
    shapes = data.draw(st.lists(sizes, min_size=0, max_size=5), "shapes")
    contextual, mask = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(MASKS))
    check(problem(shapes, contextual, mask, bias_rows=data.draw(st.sampled_from([0, None]))), REFERENCE)


@everywhere
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_tokens(lengths, runner):
    layout = SequenceLayout(torch.tensor(lengths, dtype=torch.int64))
    given = problem([], heads=2, bias_rows=2).cast(torch.float32).with_options(layout=layout)
    out, *grads = harness.results(given, runner)
    assert out.shape == (0, 2, 2)
    assert not any(gradient.any() for gradient in grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_of_the_reference_stays_near_float64(dtype):
    given = problem([(60, 5), (3, 1), (33, 0)], 1, heads=2, bias_rows=None, dims=(16, 16), scale_len=64)
    tables = dict.fromkeys(BIAS[:2], torch.float64)
    ours, exact = (harness.results(given.cast(to, **tables), REFERENCE) for to in (dtype, torch.float64))
    assert ours[0].dtype == dtype
    for got, want in zip(ours[:4], exact[:4], strict=True):
        assert (got.double() - want).norm() / want.norm() < 8 * torch.finfo(dtype).eps


@interpreted
@pytest.mark.parametrize(
    ("mask", "keys_kernels"),
    [(MASKS[0], ("keys",)), (AttentionMask(5, 4, True, 3), ("grad_v", "grad_k"))],
    ids=str,
)
def test_float16_with_one_kernel_for_keys_and_with_two(mask, keys_kernels, monkeypatch):
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    from recsys.ops.hstu_attention import triton as triton_launch

    monkeypatch.setattr(triton_launch, "keys_kernels", lambda *_: keys_kernels)
    given = problem(SHAPES, 3, mask, dims=(16, 7), scale_len=64).cast(torch.float16)
    harness.assert_near(given, INTERPRETER, floor=0.0)


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    given = problem(SHAPES[::-1], 1, heads=2).cast(torch.float32)
    with harness.guarded_memory(monkeypatch) as buffers:
        (out,), leaves = harness.call(given, INTERPRETER)
        torch.autograd.grad(out, leaves, torch.ones(out.shape))
    assert len(buffers) >= 4


@everywhere
def test_a_sample_with_nan_spoils_no_other(runner):
    given = problem([(4, 1), (9, 0), (5, 2)], heads=2).cast(torch.float32)
    clean = harness.results(given, runner)
    for name in "qkv":
        given.tensors[name].detach()[5:14] = torch.nan
    for before, after in zip(clean, harness.results(given, runner), strict=True):
        assert torch.equal(before[:5], after[:5]) and torch.equal(before[14:], after[14:])
        assert after[5:14].isnan().all()


@pytest.mark.parametrize("group", [1, 2])
def test_candidates_may_be_permuted_and_removed(group):
    """Also with relative bias: a candidate group stands behind the history, wherever it is listed."""
    before, num_groups = 6, 3
    layout = layout_of([Sample(2, 4, num_groups * group)])
    inputs = [tensor.detach() for tensor in qkv(layout.total_len)]
    bias = relative_bias(layout.total_len, rows=2)
    mask = AttentionMask(target_group_size=group)
    out = hstu_attention(*inputs, layout, mask, scale_len=8, bias=bias)
    for groups in ([2, 0, 1], [1], [2, 1]):
        targets = torch.tensor([before + g * group + place for g in groups for place in range(group)])
        rows = torch.cat([torch.arange(before), targets])
        moved = RelativeBias(
            bias.position_table, bias.time_table, bias.timestamps[rows], bias.next_timestamps[rows]
        )
        fewer = layout_of([Sample(2, 4, len(targets))])
        again = hstu_attention(*(t[rows] for t in inputs), fewer, mask, scale_len=8, bias=moved)
        torch.testing.assert_close(again, out[rows], **EXACT)


def test_the_future_does_not_reach_the_past_in_two_layers():
    layout = layout_of([Sample(2, 6, 0)])
    mask = AttentionMask(contextual_reads_history=False)
    x = qkv(8, dim=4, v_dim=4)[0].detach()

    def two_layers(x, mask):
        for _ in range(2):
            x = hstu_attention(x, x, x, layout, mask, scale_len=8)
        return x

    moved = x.clone()
    moved[7] += 1
    assert torch.equal(two_layers(x, mask)[2:7], two_layers(moved, mask)[2:7])
    assert not torch.equal(two_layers(x, AttentionMask())[2:7], two_layers(moved, AttentionMask())[2:7])


@everywhere
def test_views_of_one_projection_and_a_transposed_gradient(runner):
    layout = layout_of(samples(1, SHAPES)).to(runner.device)
    joint = torch.randn(layout.total_len, 2, 8).to(runner.device).requires_grad_()
    parts = joint.split([3, 3, 2], dim=2)
    outs = [
        hstu_attention(*given, layout, scale_len=8, backend=backend)
        for given, backend in ((parts, runner.backend), ([part.contiguous() for part in parts], "reference"))
    ]
    cotangent = torch.randn(2, 2, layout.total_len).to(runner.device).permute(2, 1, 0)
    got, want = (torch.autograd.grad(out, joint, cotangent, retain_graph=True)[0] for out in outs)
    assert runner != REFERENCE or torch.equal(*outs)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@everywhere
def test_scores_as_large_as_they_get_are_masked_and_finite(runner):
    """The mask must hide a key however well it matches, and SiLU must not overflow far from zero."""
    layout = SequenceLayout(torch.tensor([2])).to(runner.device)
    k = torch.tensor([-1.0, 1e15]).view(2, 1, 1)
    leaves = [
        leaf.to(runner.device).requires_grad_()
        for leaf in (torch.full((2, 1, 1), 3e4), k, torch.ones(2, 1, 1))
    ]
    out = hstu_attention(*leaves, layout, alpha=1.0, scale_len=1, backend=runner.backend)
    assert out[0].item() == 0.0 and out[1].item() == pytest.approx(3e19)
    for gradient in torch.autograd.grad(out[0], leaves):
        assert not gradient.any()


@interpreted
@pytest.mark.parametrize("shapes", [[(9, 5), (0, 0), (3, 0)], [(0, 0)]])
def test_the_library_ops(shapes, monkeypatch):
    """Schemas, shapes without numbers, gradients: a compiler relies on them. D != V, a strided input."""
    from recsys.ops.hstu_attention import triton as ops

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
        harness.opcheck(ops.hstu_attention_triton, (*leaves, *rest), differentiable=True)
        arguments = (torch.randn(v.shape), *(leaf.detach() for leaf in leaves), *rest)
        harness.opcheck(ops.hstu_attention_triton_backward, arguments)


@interpreted
def test_edges_of_time_buckets_are_those_of_the_definition():
    from recsys.ops.hstu_attention.bias.kernels import time_edges

    edges = time_edges(100)
    assert edges[0] == 1 and edges[-1] == 2**63 - 1 and len(edges) == 101
    for bucket, edge in enumerate(edges[1:-1], start=1):
        before, at = time_bucket(torch.tensor([edge - 1, edge]), 100).tolist()
        assert before < bucket <= at


test_the_kernels_in_the_interpreter = harness.interpreter_test(__file__)


def test_the_reference_owns_up_to_atomics(monkeypatch):
    facts = AttentionFacts(
        device="cuda",
        dtype=torch.float32,
        num_heads=1,
        qk_dim=2,
        v_dim=2,
        mask=AttentionMask(),
        has_bias=True,
        needs_grad=True,
        deterministic=True,
    )
    assert "use_deterministic_algorithms" in reference.supports(facts).reason
    for field, value in (
        ("device", "cpu"),
        ("has_bias", False),
        ("needs_grad", False),
        ("deterministic", False),
    ):
        assert reference.supports(dataclasses.replace(facts, **{field: value})).ok
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert reference.supports(facts).ok
