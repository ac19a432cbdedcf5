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
from tests.ops.attention import BIAS, by_loops, problem
from tests.ops.cases import MASKS, cut, layout_of, qkv, relative_bias, samples
from tests.ops.harness import REFERENCE, Runner, runners
from tests.ops.hstu_attention.cached.calls import cached, check, output
from tests.ops.oracle import Sample
from tests.tools.interpreter import INTERPRETED, WithNumbersOnly, interpreted

INTERPRETER = Runner("triton", "cpu")
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums in another order

# Of samples with 5, 0, 0, 6 and 1 events. With three contextual tokens a cache without events is not empty.
SMALL_CUTS = ([0, 0, 0, 0, 0], [9, 9, 9, 9, 9], [2, 0, 0, 5, 1], [3, 0, 0, 0, 0])
RAGGED = SMALL_CUTS[2]

# Caches and new tokens inside a tile, over several, odd, empty; the last sample has nothing new.
SHAPES = [(29, 5), (0, 3), (0, 0), (23, 0), (12, 19), (9, 0)]
CUTS = {"ragged": [13, 0, 0, 22, 12, 9], "nothing cached": [0] * 6, "all cached": [99] * 6}

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))
by_kernels = pytest.mark.parametrize("runner", runners("triton"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles a sample, several blocks a tile."""
    if not INTERPRETED:
        return
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    monkeypatch.setattr(triton_ops, "blocks_for", lambda *_: Blocks(16, 8, 4, 1))


@pytest.mark.parametrize(
    ("mask", "contextual"),
    [(mask, 3 * (i.bit_count() % 2)) for i, mask in enumerate(MASKS)],
    ids=str,
)
def test_the_reference_has_the_rows_of_the_whole(mask, contextual):
    """Caches of nothing, of all events, ragged ones, and samples without one; with and without a bias.

    All masks, and each pair of a setting of the mask and a number of contextual tokens.
    """
    for rows in (0, None, 2):
        given = problem(cases.SHAPES, contextual, mask, heads=2, bias_rows=rows)
        whole = output(given, REFERENCE)
        for num_cached in SMALL_CUTS:
            new = cached(given, num_cached)
            torch.testing.assert_close(output(new, REFERENCE), new.options["parts"].new(whole), **EXACT)


MASK_CASES = [(mask, 3 * (i % 2), "ragged") for i, mask in enumerate(MASKS[1::5])]
MASK_CASES += [(mask, 3, cached) for mask in MASKS[1::25] for cached in ("nothing cached", "all cached")]


@by_kernels
@pytest.mark.parametrize(("mask", "contextual", "kept"), MASK_CASES, ids=str)
def test_new_tokens_get_their_rows_of_the_whole(mask, contextual, kept, runner):
    """Ragged caches meet all masks; caches of nothing and of everything do not depend on the mask."""
    check(problem(SHAPES, contextual, mask), CUTS[kept], runner)


@by_kernels
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[3::9], [None, 2] * 3, strict=False)), ids=str)
def test_bias(mask, rows, runner):
    check(problem(SHAPES, 1, mask, heads=rows or 1, bias_rows=rows), CUTS["ragged"], runner)


@everywhere
@pytest.mark.parametrize("mask", [AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)], ids=str)
def test_groups_longer_than_a_tile(mask, runner):
    """Against the loops."""
    given = problem([(21, 13), (7, 0), (9, 3)], 2, mask, bias_rows=1)
    new = cached(given, [17, 3, 9]).cast(torch.float64 if runner == REFERENCE else torch.float32)
    expected = new.options["parts"].new(by_loops(**given.tensors, **given.options))
    close = 1e-11 if runner == REFERENCE else 2e-5 if runner.is_interpreted else 1e-4
    harness.assert_close([output(new, runner)], [expected], close)


@by_kernels
@pytest.mark.parametrize(
    ("mask", "rows", "parts"),
    list(zip(MASKS[1::9], [0, 2, None] * 2, [2, 8] * 3, strict=True)),
    ids=str,
)
def test_keys_in_parts(mask, rows, parts, monkeypatch, runner):
    """Parts of several blocks, of one and of none, with each kind of bias. Sums that nobody has written are
    NaN."""
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    monkeypatch.setattr(triton_ops, "num_parts", lambda *_: parts)
    given = problem([(45, 5), (0, 3), (0, 0), (12, 19)], 2, mask, heads=2, bias_rows=rows)
    check(given, [43, 0, 0, 12], runner)


@by_kernels
@pytest.mark.parametrize(("dims", "alpha"), [((16, 5), 0.0), ((24, 16), -0.7), ((1, 33), None)])
def test_other_dimensions_and_alphas(dims, alpha, runner):
    check(problem(SHAPES, heads=3, dims=dims, alpha=alpha), CUTS["ragged"], runner)


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_layouts_are_the_loops(data):
    shapes = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=4), "cached, new, targets")
    whole = [(kept + new, targets) for kept, new, targets in shapes]
    given = problem(
        whole,
        data.draw(st.integers(0, 3), "contextual") if shapes else 0,
        data.draw(st.sampled_from([*MASKS, AttentionMask(2, 1, True, 3)]), "mask"),
        heads=2,
        bias_rows=data.draw(st.sampled_from([0, 2]), "bias"),
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


@interpreted
def test_float16():
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    given = problem(SHAPES, 3, AttentionMask(5, 4, True, 3), heads=2, dims=(16, 7), scale_len=64)
    half = cached(given.cast(torch.float16), CUTS["ragged"])
    ours, theirs = (output(half, runner) for runner in (INTERPRETER, REFERENCE))
    exact = output(half.cast(torch.float64), REFERENCE)
    harness.assert_as_near([ours], [theirs], [exact], floor=0.0)


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    new = cached(problem(SHAPES[::-1], 1, heads=2).cast(torch.float32), CUTS["ragged"][::-1])
    with harness.guarded_memory(monkeypatch):
        output(new, INTERPRETER)


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


@everywhere
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_tokens(lengths, runner):
    layout = SequenceLayout(torch.tensor(lengths, dtype=torch.int64))
    for rows in (0, 2):
        given = problem([], heads=2, bias_rows=rows).cast(torch.float32).with_options(layout=layout)
        assert output(cached(given, [0] * len(lengths)), runner).shape == (0, 2, 2)


@everywhere
def test_a_sample_with_nan_spoils_no_other(runner):
    given = problem([(14, 1), (9, 2), (5, 2)], 1, heads=2).cast(torch.float32)
    new = cached(given, [3, 5, 5])
    clean = output(new, runner)
    for name in "qkv":
        given.tensors[name].detach()[16:28] = torch.nan
    out = output(new, runner)
    assert torch.equal(out[:12], clean[:12]) and torch.equal(out[18:], clean[18:])
    assert out[12:18].isnan().all()


@interpreted
def test_the_library_op_in_the_interpreter(monkeypatch):
    """Its schema and shapes without numbers: a compiler relies on them. D != V, a strided input."""
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    monkeypatch.setattr(SequenceLayout, "host_copy", None)  # as if the lengths were on a device
    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    for batch in (samples(1, SHAPES), samples(1, [(0, 0)])):
        parts = cut(batch, CUTS["ragged"][: len(batch)])
        tensors = [t.detach().float() for t in qkv(sum(sample.length for sample in batch), dim=3, v_dim=5)]
        q, k, v, layout, cache_k, cache_v, cached = parts.arguments(*tensors)
        bias = parts.bias(relative_bias(sum(sample.length for sample in batch), rows=2))
        tables = (bias.position_table.float(), bias.time_table.float())
        times = (bias.timestamps, bias.next_timestamps)
        lengths = (layout.lengths, layout.offsets, layout.num_targets)
        kept = (cache_k, cache_v, cached.lengths, cached.offsets)
        for more, last in (((*tables, *times), bias.cache_timestamps), ((None,) * 4, None)):
            arguments = (q, k.transpose(0, 1).contiguous().transpose(0, 1), v, *lengths, *more)
            arguments = (*arguments, 0, 3, 2, False, 2, True, 0.5, 8.0, False, *kept, last, 1)
            harness.opcheck(triton_ops.hstu_attention_cached_triton, arguments)


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
    new = cached(given, RAGGED)
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
