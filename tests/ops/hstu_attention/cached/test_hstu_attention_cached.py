"""`hstu_attention_cached` on every backend against whole samples, and what a model with a cache relies on."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import (
    AttentionMask,
    RelativeBias,
    SequenceLayout,
    hstu_attention,
    hstu_attention_cached,
)
from recsys.ops.hstu_attention.block_sizes import Blocks
from recsys.ops.jagged import padding
from tests.ops import cases, harness, oracle
from tests.ops.attention import BIAS, by_loops, large, problem
from tests.ops.cases import MASKS, cut, layout_of, qkv, relative_bias, samples
from tests.ops.harness import REFERENCE, Case, OpTests, Problem, runners
from tests.ops.hstu_attention.cached.calls import assert_near, behind, cached, check, output
from tests.ops.oracle import Sample

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums in another order

# Caches and new tokens inside a tile, over several, odd, empty; the last sample has nothing new.
SHAPES = [(29, 5), (0, 3), (0, 0), (23, 0), (12, 19), (9, 0)]
RAGGED = [13, 0, 0, 22, 12, 9]
SMALL = {"hstu_attention.cached.triton": {"blocks_for": lambda _: lambda *_: Blocks(16, 8, 4, 1)}}
"""Several tiles a sample, several blocks a tile."""


def case(num_cached, *given, **options) -> Case:
    return Case(behind, num_cached, *given, **options)


def half(dtype) -> Case:
    return Case(narrow, RAGGED, dtype, SHAPES, 3, AttentionMask(5, 4, True, 3), dims=(16, 7), scale_len=64)


def narrow(num_cached, dtype, *given, **options) -> Problem:
    return behind(num_cached, *given, heads=2, **options).cast(dtype)


def compare(new, runner, view=None) -> None:
    """In 16 bits at most twice as far from float64 as the reference of new tokens."""
    if new.tensors["q"].dtype.itemsize == 8:
        check(new, runner, view)
    elif runner.is_interpreted:
        harness.assert_near(new, runner, floor=0.0)
    else:
        assert_near(new, runner)


@st.composite
def random_cases(draw) -> Case:
    sizes = st.tuples(st.integers(0, 400), st.integers(0, 150), st.integers(0, 150))
    shapes = draw(st.lists(sizes, min_size=1, max_size=5))  # cached, new, targets
    dims = draw(st.tuples(*[st.sampled_from([16, 33, 64, 128, 200, 256])] * 2))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    mask = draw(st.sampled_from([*MASKS, AttentionMask(130, 70, True, 5)]))
    rest = (dims, dtype, draw(st.sampled_from([0, 0, None, 2])), mask)
    return Case(large_behind, shapes, draw(st.sampled_from([0, 1, 6])), *rest)


def large_behind(shapes, *given, **options) -> Problem:
    """`large` attention of samples of so many cached events, new ones, and targets."""
    whole = [(kept + new, targets) for kept, new, targets in shapes]
    return cached(large(whole, *given, **options), [kept for kept, *_ in shapes])


def library(device):
    """D != V, a strided input, with a bias and without."""
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    for shapes, biased in (([(5, 2), (0, 0), (2, 0)], True), ([(0, 0)], False)):
        batch = samples(1, shapes)
        parts, total = cut(batch, [3, 0, 1][: len(batch)]), sum(sample.length for sample in batch)
        tensors = [t.detach().float() for t in qkv(total, dim=3, v_dim=5)]
        q, k, v, layout, cache_k, cache_v, old = parts.arguments(*tensors)
        bias, more, last = parts.bias(relative_bias(total, rows=2)), (None,) * 4, None
        if biased:
            tables = (bias.position_table.float(), bias.time_table.float())
            more, last = (*tables, bias.timestamps, bias.next_timestamps), bias.cache_timestamps
        lengths = (layout.lengths, layout.offsets, layout.num_targets)
        rest = (
            *more,
            0,
            3,
            2,
            False,
            2,
            True,
            0.5,
            8.0,
            False,
            cache_k,
            cache_v,
            old.lengths,
            old.offsets,
            last,
        )
        arguments = [q, harness.turned(k), v, *lengths, *rest, 1]
        moved = [value.to(device) if isinstance(value, torch.Tensor) else value for value in arguments]
        yield triton_ops.hstu_attention_cached_triton, tuple(moved), False


NO_TOKENS = [SequenceLayout(torch.tensor(lengths, dtype=torch.int64)) for lengths in ([], [0, 0])]
TESTS = OpTests(
    compare=compare,
    # Ragged caches meet all kinds of masks; caches of nothing and of everything do not depend on the mask.
    kernels=[case(RAGGED, SHAPES, 3 * (i % 2), mask) for i, mask in enumerate(MASKS[1::9])]
    + [case([size] * 6, SHAPES, 3, MASKS[26]) for size in (0, 99)]
    + [
        case(RAGGED, SHAPES, 1, mask, heads=rows or 1, bias_rows=rows)
        for mask, rows in ((MASKS[3], None), (MASKS[21], 2), (MASKS[39], None))
    ]
    + [
        case(RAGGED[:4], SHAPES[:4], heads=3, dims=dims, alpha=alpha)
        for dims, alpha in (((16, 5), 0.0), ((24, 16), -0.7), ((1, 33), None))
    ],
    # Groups longer than a tile.
    everywhere=[
        case([17, 3, 9], [(21, 13), (7, 0), (9, 3)], 2, mask, bias_rows=1)
        for mask in (AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3))
    ],
    halves=[half],
    strided=case(RAGGED, SHAPES, 1, heads=2),
    guarded=case(RAGGED[::-1], SHAPES[::-1], 1, heads=2),
    empty=[
        case([0] * layout.batch_size, [], heads=2, bias_rows=rows, layout=layout)
        for layout in NO_TOKENS
        for rows in (0, 2)
    ],
    random=random_cases(),
    library=library,
    wrapped=["hstu_attention.cached.triton"],
)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize(("rows", "parts"), [(0, 2), (2, 8), (None, 2), (0, 8)])
def test_keys_in_parts(rows, parts, monkeypatch, runner):
    """Parts of several blocks, of one and of none, with each kind of bias. Sums that nobody has written are
    NaN."""
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    monkeypatch.setattr(triton_ops, "num_parts", lambda *_: parts)
    shapes, mask = [(45, 5), (0, 3), (0, 0), (12, 19)], MASKS[10 + 9 * (parts == 8)]
    check(behind([43, 0, 0, 12], shapes, 2, mask, heads=2, bias_rows=rows), runner)


@hypothesis.settings(max_examples=80)
@hypothesis.given(data=st.data())
def test_random_layouts_are_the_loops(data):
    shapes = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=4), "cached, new, targets")
    whole = [(kept + new, targets) for kept, new, targets in shapes]
    given = problem(
        whole,
        data.draw(st.integers(0, 3), "contextual") if shapes else 0,
        data.draw(st.sampled_from([*MASKS, AttentionMask(2, 1, True, 3)]), "mask"),
        heads=2,
        bias_rows=data.draw(st.sampled_from([0, None, 2]), "bias"),
        dims=(3, data.draw(st.sampled_from([1, 5]))),
        alpha=data.draw(st.sampled_from([None, 0.0, -0.7]), "alpha"),
    )
    new = cached(given, [kept for kept, *_ in shapes])
    expected = by_loops(**given.tensors, **given.options)
    torch.testing.assert_close(
        output(new, REFERENCE), new.options["parts"].new(expected), rtol=1e-11, atol=1e-12
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, None)])
def test_lower_precision_of_the_reference_stays_near_float64(dtype, tolerance):
    """The error is at most twice that of whole samples in the same type."""
    given = problem(
        [(60, 5), (3, 1), (33, 0)],
        1,
        AttentionMask(window=20, prefix=3),
        heads=2,
        bias_rows=None,
        dims=(16, 16),
        scale_len=64,
    )
    tables = dict.fromkeys(BIAS[:2], torch.float64)
    new, rounded = cached(given, [40, 0, 33]), given.cast(dtype, **tables)
    parts = new.options["parts"]
    out = output(new.cast(dtype, **tables), REFERENCE)
    exact, uncached = (parts.new(output(whole, REFERENCE)) for whole in (given, rounded))
    assert out.dtype == dtype
    error, allowed = ((result.double() - exact).norm() for result in (out, uncached))
    assert error < 2 * allowed
    if tolerance is not None:
        torch.testing.assert_close(out, uncached, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("runner", runners("reference", "triton"))
def test_a_sample_with_nan_spoils_no_other(runner):
    given = problem([(14, 1), (9, 2), (5, 2)], 1, heads=2).cast(torch.float32)
    new = cached(given, [3, 5, 5])
    clean = output(new, runner)
    for name in "qkv":
        given.tensors[name].detach()[16:28] = torch.nan
    out = output(new, runner)
    assert torch.equal(out[:12], clean[:12]) and torch.equal(out[18:], clean[18:])
    assert out[12:18].isnan().all()


test_the_kernel_in_the_interpreter = harness.interpreter_test(__file__)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_candidates_in_microbatches_against_one_cache(size):
    """Also of whole groups, and with bias: a candidate's output does not depend on its microbatch."""
    mask = AttentionMask(window=4, prefix=1, target_window=True, target_group_size=size)
    batch = [Sample(2, 7, 6 * size), Sample(2, 0, 6 * size), Sample(2, 3, 6 * size)]
    whole, parts = layout_of(batch), cut(batch, [7, 0, 3])
    inputs = [tensor.detach() for tensor in qkv(whole.total_len)]
    bias = relative_bias(whole.total_len, rows=2)
    expected = parts.new(hstu_attention(*inputs, whole, mask, scale_len=8, bias=bias)).view(3, 6 * size, 2, 2)
    q, k, v, _, *cache = parts.arguments(*inputs)
    new_bias = parts.bias(bias)
    begin = 0
    for groups in (1, 2, 3):
        chosen = slice(begin, begin + groups * size)
        begin += groups * size

        def take(values, chosen=chosen):
            return values.unflatten(0, (3, 6 * size))[:, chosen].flatten(0, 1)

        few = RelativeBias(
            new_bias.position_table,
            new_bias.time_table,
            take(new_bias.timestamps),
            take(new_bias.next_timestamps),
        )
        targets = torch.full((3,), groups * size)
        out = hstu_attention_cached(
            *map(take, (q, k, v)),
            SequenceLayout(targets, targets),
            *cache,
            mask,
            scale_len=8,
            bias=few.with_cache(new_bias.cache_timestamps),
        )
        torch.testing.assert_close(out.view(3, -1, 2, 2), expected[:, chosen], **EXACT)


@pytest.mark.parametrize("limits", [(0, 1), (2**40, 2**40)])
def test_it_is_the_same_however_it_is_cut_into_chunks(limits, monkeypatch):
    monkeypatch.setattr(padding, "CPU_LIMITS", padding.Limits(max_scores=limits[1], wasted_scores=limits[0]))
    given = problem(cases.SHAPES, 1, AttentionMask(window=2), heads=2, scale_len=3)
    new = cached(given, [2, 0, 0, 5, 1])
    expected = new.options["parts"].new(by_loops(**given.tensors, **given.options))
    torch.testing.assert_close(output(new, REFERENCE), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_appended_history_leaves_old_rows_alone_where_the_mask_says_so(mask):
    """`history_can_grow` says if a cache of many layers may be extended; the table of who sees whom
    decides."""
    for contextual in (0, 2):
        before, after = Sample(contextual, 3, 0), Sample(contextual, 5, 0)
        unchanged = all(
            [oracle.sees(before, i, j, mask) for j in range(before.length)] + [False] * 2
            == [oracle.sees(after, i, j, mask) for j in range(after.length)]
            for i in range(before.length)
        )
        assert mask.history_can_grow(contextual) == unchanged


def stack(x, layout, mask, weights, caches=None, cache_layout=None):
    """Layers x + attention, each with its q, k and v; keeps k and v a layer, in front of them `caches`."""
    kept = []
    for number, weight in enumerate(weights):
        q, k, v = (x @ weight).unflatten(1, (1, -1)).split(4, dim=2)
        if caches is None:
            out = hstu_attention(q, k, v, layout, mask, scale_len=8)
        else:
            out = hstu_attention_cached(
                q, k, v, layout, caches[number][0], caches[number][1], cache_layout, mask, scale_len=8
            )
        kept.append((k, v))
        x = x + out.flatten(1)
    return x, kept


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize(("reads", "contextual"), [(True, 2), (False, 2), (True, 0)])
def test_a_stack_with_a_cache(reads, contextual, layers):
    """Targets are exact for every mask. New events are beyond one layer where `history_can_grow` says so."""
    mask = AttentionMask(window=4, prefix=1, contextual_reads_history=reads)
    weights = torch.randn(layers, 4, 12, dtype=torch.float64)
    for extended in (False, True):
        old, new, targets = (5, 2, 3) if extended else (7, 0, 3)
        prefilled, grown = Sample(contextual, old, 0), Sample(contextual, old + new, targets)
        x = torch.randn(grown.length, 4, dtype=torch.float64)
        _, caches = stack(x[: prefilled.length], layout_of([prefilled]), mask, weights)
        rest = SequenceLayout(torch.tensor([new + targets]), torch.tensor([targets]))
        out, _ = stack(x[prefilled.length :], rest, mask, weights, caches, layout_of([prefilled]))
        expected, _ = stack(x, layout_of([grown]), mask, weights)
        equal = torch.allclose(out, expected[prefilled.length :], rtol=1e-10, atol=1e-10)
        assert equal == (not extended or layers == 1 or mask.history_can_grow(contextual))
