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
from tests.ops.harness import REFERENCE, Case, OpTests, Runner, assert_close, assert_is, runners
from tests.ops.oracle import Sample
from tests.tools.interpreter import interpreted

INTERPRETER = Runner("triton", "cpu")
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # float64, sums in another order

# Tiles of rows and keys in several sizes: inside a tile, over several, odd, no history, no targets, empty.
SHAPES = [(9, 5), (0, 3), (0, 0), (17, 0), (2, 9)]
FIRST, SECOND = AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)


def small_blocks(_):
    """Several tiles a sample, several blocks a tile, of different sizes in either direction."""
    sizes = {"forward": Blocks(16, 8, 4, 1), "keys": Blocks(8, 16, 4, 1), "rows": Blocks(8, 8, 4, 1)}
    sizes |= {"grad_k": Blocks(8, 8, 4, 1), "grad_v": sizes["keys"], "tables": Blocks(16, 8, 4, 1)}
    return lambda kernel, *_: sizes[kernel]


SMALL = {"hstu_attention.triton": {"blocks_for": small_blocks}}


def check(given, runner, view=None):
    """Output and all gradients: of the reference those of the loops, of kernels those of the reference, in
    float64."""
    if runner == REFERENCE:
        return assert_is(given, by_loops, close=1e-12)
    (out, *grads), (exact, *wanted) = (
        harness.results(given.cast(torch.float32), runner, view),
        harness.results(given, REFERENCE),
    )
    # Products in three passes of TF32 on a GPU are not as near as the interpreter's.
    close = 2e-5 if runner.is_interpreted else 1e-4
    assert_close([out], [exact], close)
    for grad, want in zip(grads, wanted, strict=True):
        assert (grad.cpu() - want).norm() <= close / 2 * max(1.0, want.norm())
    assert_close(grads, wanted, 10 * close)


def library(device):
    """D != V, a strided input, with a bias and without."""
    from recsys.ops.hstu_attention import triton as ops

    for shapes, bias_rows in (([(3, 2), (0, 0), (1, 0)], 2), ([(0, 0)], 0)):
        layout = layout_of(samples(0, shapes)).to(device)
        q, k, v = (t.detach().float().to(device) for t in qkv(layout.total_len, heads=2, dim=3, v_dim=5))
        more = [None] * 4
        if bias_rows:
            bias = relative_bias(layout.total_len, rows=bias_rows)
            more = [bias.position_table.detach().float(), bias.time_table.detach().float()]
            more = [t.to(device) for t in (*more, bias.timestamps, bias.next_timestamps)]
        leaves = [tensor.requires_grad_() for tensor in (q, harness.turned(k), v)]
        rest = (
            layout.lengths,
            layout.offsets,
            layout.num_targets,
            *more,
            0,
            3,
            2,
            False,
            2,
            True,
            0.5,
            8.0,
            True,
        )
        yield ops.hstu_attention_triton, (*leaves, *rest), True
        detached = (leaf.detach() for leaf in leaves)
        yield ops.hstu_attention_triton_backward, (torch.randn_like(v), *detached, *rest), False


NO_TOKENS = [SequenceLayout(torch.tensor(lengths, dtype=torch.int64)) for lengths in ([], [0, 0])]
TESTS = OpTests(
    compare=check,
    expected=by_loops,
    close=1e-12,
    # Each pair of a setting of the mask and a number of contextual tokens; random layouts have all masks.
    exact=[
        Case(problem, cases.SHAPES, (0, 1, 3)[i % 3], mask, heads=2, bias_rows=(None, 2)[i // 3 % 2])
        for i, mask in enumerate(MASKS[::5])
    ]
    # One mask and one table of distances serve all such samples, unless contextual tokens read histories.
    + [
        Case(problem, [(5, 0), (0, 0), (1, 0), (7, 0)], contextual, mask, heads=2, bias_rows=2)
        for contextual, window in ((0, 2), (2, None))
        for mask in (AttentionMask(window), AttentionMask(window, contextual_reads_history=False))
    ],
    kernels=[Case(problem, SHAPES, (0, 3)[i % 2], mask) for i, mask in enumerate(MASKS[1::13])]
    + [Case(problem, SHAPES[:4], 1, MASKS[15], heads=2, bias_rows=2)]
    + [Case(problem, [(9, 3), (2, 0)], 1, MASKS[27], bias_rows=None)]
    # Few buckets in a block of scores, many, and differences that are not exact in float32.
    + [
        Case(problem, [(12, 2), (2, 0)], 1, bias_rows=1, times=kind)
        for kind in ("hours", "minutes", "equal", "anywhere", "backward")
    ],
    # Groups longer than a tile. Contextual tokens in several tiles: those that do not read the history see
    # later contextual tokens all the same. Other dimensions and alphas.
    everywhere=[Case(problem, [(1, 13), (7, 0), (9, 3)], 2, mask, bias_rows=1) for mask in (FIRST, SECOND)]
    + [Case(problem, [(3, 0), (0, 0)], 18, AttentionMask(contextual_reads_history=False), bias_rows=1)]
    + [
        Case(problem, SHAPES[:3], heads=3, dims=dims, alpha=alpha)
        for dims, alpha in (((16, 5), 0.0), ((24, 16), -0.7), ((1, 33), None))
    ],
    strided=Case(problem, SHAPES[:4], 1, heads=2),
    guarded=Case(problem, SHAPES[::-1], 1, heads=2),
    empty=[Case(problem, [], heads=2, bias_rows=2, layout=layout) for layout in NO_TOKENS],
    on_gpus=[
        Case(problem, [(3, 0), (0, 0)], 300, AttentionMask(contextual_reads_history=False), bias_rows=1)
    ],
    library=library,
    wrapped=["hstu_attention.triton"],
)


@interpreted
@pytest.mark.parametrize("mask", [AttentionMask(), AttentionMask(20, 5)], ids=str)
def test_tables_by_several_workers_near_the_diagonal_and_far_from_it(mask, monkeypatch):
    from recsys.ops.hstu_attention import triton as triton_launch
    from recsys.ops.hstu_attention.bias import table_kernels

    monkeypatch.setattr(triton_launch, "num_processors", lambda device: 3)
    monkeypatch.setattr(triton_launch, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(table_kernels, "NEAR_TILES", 1)
    check(problem([(29, 3), (9, 0)], 0, mask, bias_rows=1), INTERPRETER)


@hypothesis.settings(max_examples=30)
@hypothesis.given(data=st.data())
def test_random_layouts_are_the_loops(data):
    sizes = st.tuples(st.integers(0, 6), st.integers(0, 4))
    shapes = data.draw(st.lists(sizes, min_size=0, max_size=5), "shapes")
    contextual, mask = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(MASKS))
    check(problem(shapes, contextual, mask, bias_rows=data.draw(st.sampled_from([0, None]))), REFERENCE)


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


@pytest.mark.parametrize("runner", runners("reference", "triton"))
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


@pytest.mark.parametrize("runner", runners("reference", "triton"))
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
def test_edges_of_time_buckets_are_those_of_the_definition():
    from recsys.ops.hstu_attention.bias.kernels import time_edges

    edges = time_edges(100)
    assert edges[0] == 1 and edges[-1] == 2**63 - 1 and len(edges) == 101
    for bucket, edge in enumerate(edges[1:-1], start=1):
        before, at = time_bucket(torch.tensor([edge - 1, edge]), 100).tolist()
        assert before < bucket <= at


test_the_kernels_in_the_interpreter = harness.interpreter_test(__file__)


def test_the_reference_owns_up_to_atomics(monkeypatch):
    facts = AttentionFacts("cuda", torch.float32, 1, 2, 2, AttentionMask(), True, True, True)
    assert "use_deterministic_algorithms" in reference.supports(facts).reason
    others = {"device": "cpu"} | dict.fromkeys(("has_bias", "needs_grad", "deterministic"), False)
    for field, value in others.items():
        assert reference.supports(dataclasses.replace(facts, **{field: value})).ok
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert reference.supports(facts).ok
