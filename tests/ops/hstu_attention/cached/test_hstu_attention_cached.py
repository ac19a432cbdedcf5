"""`hstu_attention_cached` against loops over queries and keys, and against whole samples."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import (
    AttentionMask,
    CachedRelativeBias,
    RelativeBias,
    SequenceLayout,
    explain,
    hstu_attention,
    hstu_attention_cached,
    last_backend,
)
from recsys.ops.jagged import padding
from tests.ops import oracle
from tests.ops.cases import MASKS, cut, layout_of, qkv, relative_bias, samples, times
from tests.ops.oracle import Sample

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums in another order

# Of samples with 5, 0, 0, 6 and 1 events. With three contextual tokens a cache without events is not empty.
CUTS = {
    "nothing cached": [0, 0, 0, 0, 0],
    "all events cached": [9, 9, 9, 9, 9],
    "ragged": [2, 0, 0, 5, 1],
    "some samples without a cache": [3, 0, 0, 0, 0],
}


@pytest.mark.parametrize("num_cached", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("contextual", [0, 3])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_new_tokens_get_their_rows_of_the_whole(mask, contextual, num_cached):
    batch = samples(contextual)
    whole, parts = layout_of(batch), cut(batch, num_cached)
    inputs = [tensor.detach() for tensor in qkv(whole.total_len)]
    for rows in (0, None, 2):
        bias = None if rows == 0 else relative_bias(whole.total_len, rows=rows)
        expected = hstu_attention(*inputs, whole, mask, scale_len=7, bias=bias, backend="reference").detach()
        out = hstu_attention_cached(
            *parts.arguments(*inputs), mask, scale_len=7, bias=None if bias is None else parts.bias(bias)
        )
        assert last_backend("hstu_attention_cached") == "reference"
        torch.testing.assert_close(out, parts.new(expected), **EXACT)


@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_layouts_equal_the_loops(data):
    contextual = data.draw(st.integers(0, 3), "contextual")
    shapes = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=4), "cached, new, targets")
    mask = data.draw(st.sampled_from([*MASKS, AttentionMask(2, 1, True, 3)]), "mask")
    alpha = data.draw(st.sampled_from([None, 0.0, -0.7]), "alpha")
    batch = samples(contextual, [(cached + new, targets) for cached, new, targets in shapes])
    total_len, parts = sum(sample.length for sample in batch), cut(batch, [cached for cached, *_ in shapes])
    inputs = [tensor.detach() for tensor in qkv(total_len, dim=3, v_dim=data.draw(st.sampled_from([1, 5])))]
    bias = relative_bias(total_len, rows=2) if data.draw(st.booleans(), "bias") else None
    out = hstu_attention_cached(
        *parts.arguments(*inputs),
        mask,
        alpha=alpha,
        scale_len=4,
        bias=None if bias is None else parts.bias(bias),
    )
    expected = oracle.hstu(*inputs, batch, mask, 3**-0.5 if alpha is None else alpha, 4, bias)
    torch.testing.assert_close(out, parts.new(expected), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, None)])
def test_lower_precision_stays_near_float64(dtype, tolerance):
    """The error is at most twice that of whole samples in the same type."""
    batch = samples(1, [(60, 5), (3, 1), (33, 0)])
    whole, parts = layout_of(batch), cut(batch, [40, 0, 33])
    inputs = [tensor.detach() for tensor in qkv(whole.total_len, dim=16, v_dim=16)]
    bias = relative_bias(whole.total_len, rows=None)
    mask = AttentionMask(window=20, prefix=3)
    exact = parts.new(hstu_attention(*inputs, whole, mask, scale_len=64, bias=bias))
    rounded = [tensor.to(dtype) for tensor in inputs]
    uncached = parts.new(hstu_attention(*rounded, whole, mask, scale_len=64, bias=bias))
    out = hstu_attention_cached(*parts.arguments(*rounded), mask, scale_len=64, bias=parts.bias(bias))
    assert out.dtype == dtype
    error, allowed = ((one.double() - exact).norm() for one in (out, uncached))
    assert error < 2 * allowed
    if tolerance is not None:
        torch.testing.assert_close(out, uncached, rtol=tolerance, atol=tolerance)


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
        some = slice(begin, begin + groups * size)
        begin += groups * size

        def take(values, some=some):
            return values.unflatten(0, (3, 6 * size))[:, some].flatten(0, 1)

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
        torch.testing.assert_close(out.view(3, -1, 2, 2), expected[:, some], **EXACT)


@pytest.mark.parametrize("limits", [(0, 1), (2**40, 2**40)])
def test_it_is_the_same_however_it_is_cut_into_chunks(limits, monkeypatch):
    monkeypatch.setattr(padding, "CPU_LIMITS", padding.Limits(max_scores=limits[1], wasted_scores=limits[0]))
    batch = samples(1)
    parts = cut(batch, CUTS["ragged"])
    inputs = [tensor.detach() for tensor in qkv(sum(sample.length for sample in batch))]
    out = hstu_attention_cached(*parts.arguments(*inputs), AttentionMask(window=2), scale_len=3)
    expected = oracle.hstu(*inputs, batch, AttentionMask(window=2), 3**-0.5, 3)
    torch.testing.assert_close(out, parts.new(expected), rtol=1e-11, atol=1e-12)


def test_a_sample_with_nan_spoils_no_other():
    batch = samples(1, [(4, 1), (9, 2), (5, 2)])
    parts = cut(batch, [3, 5, 5])
    inputs = [tensor.detach() for tensor in qkv(sum(sample.length for sample in batch))]
    clean = hstu_attention_cached(*parts.arguments(*inputs), scale_len=8)
    for tensor in inputs:
        tensor[6:18] = float("nan")
    out = hstu_attention_cached(*parts.arguments(*inputs), scale_len=8)
    assert torch.equal(out[:2], clean[:2]) and torch.equal(out[8:], clean[8:])
    assert out[2:8].isnan().all()


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


def arguments(**changes):
    batch = [Sample(1, 3, 2), Sample(1, 1, 0)]
    parts = cut(batch, [2, 1])
    names = ("q", "k", "v", "layout", "cache_k", "cache_v", "cache_layout")
    inputs = [tensor.detach().float() for tensor in qkv(8, dim=3, v_dim=4)]
    return dict(zip(names, parts.arguments(*inputs), strict=True)) | {"scale_len": 8} | changes


def bias_with(**changes):
    fields = {"position_table": torch.zeros(4), "time_table": torch.zeros(4)}
    fields |= dict(zip(("timestamps", "next_timestamps"), times(3), strict=True))
    return CachedRelativeBias(**(fields | {"cache_timestamps": times(5)[0]} | changes))


LAYOUT = SequenceLayout(torch.tensor([3, 2]))
WRONG = [
    ({"q": torch.zeros(3, 6)}, ValueError, r"q must have shape \[total_len, heads, dim\], got \(3, 6\)"),
    ({"layout": LAYOUT}, ValueError, "q has 3 rows, the layout total_len = 5"),
    ({"cache_layout": [4]}, TypeError, "cache_layout must be a SequenceLayout, got list"),
    (
        {"cache_layout": SequenceLayout(torch.tensor([5]))},
        ValueError,
        "cache_layout has 1 samples, layout 2; each sample of layout continues",
    ),
    (
        {"cache_layout": SequenceLayout(torch.tensor([3, 2]), torch.tensor([1, 1]))},
        ValueError,
        "cache_layout must hold no targets, it has 2",
    ),
    ({"cache_layout": LAYOUT.to("meta")}, ValueError, "cache_layout is on meta, layout on cpu"),
    (
        {"cache_layout": SequenceLayout(torch.tensor([3, 3]))},
        ValueError,
        "cache_k has 5 rows, the cache_layout total_len = 6",
    ),
    ({"cache_k": None}, TypeError, "cache_k must be a tensor, got NoneType"),
    ({"cache_k": torch.zeros(5, 2, 3).half()}, TypeError, "cache_k must have the dtype of q, torch.float32"),
    (
        {"cache_v": torch.zeros(5, 2, 3)},
        ValueError,
        r"cache_v must have shape \[cached tokens, 2, 4\] as v, got \(5, 2, 3\)",
    ),
    ({"cache_v": torch.zeros(5, 2, 4, device="meta")}, ValueError, "cache_v is on meta, v on cpu"),
    ({"scale_len": -1}, ValueError, "scale_len must be positive and finite, got -1"),
    ({"alpha": float("nan")}, ValueError, "alpha must be finite, got nan"),
    (
        {"bias": RelativeBias(torch.zeros(4), torch.zeros(4), *times(3))},
        TypeError,
        "bias must be a CachedRelativeBias .see RelativeBias.with_cache. or None, got RelativeBias",
    ),
    (
        {"bias": bias_with(cache_timestamps=times(3)[0])},
        ValueError,
        "bias.cache_timestamps has 3 entries, cache_k has 5 rows",
    ),
    ({"bias": bias_with(timestamps=times(5)[0])}, ValueError, "bias.timestamps has 5 entries, q has 3 rows"),
    (
        {"bias": bias_with(time_table=torch.zeros(3, 4))},
        ValueError,
        "bias.time_table has 3 rows, q has 2 heads",
    ),
    (
        {"backend": "cuda"},
        ValueError,
        "_cached has no backend 'cuda'; it has auto, sm90, triton, ref",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        hstu_attention_cached(**arguments(**changes))


def test_new_contextual_tokens_are_refused():
    given = arguments()
    given["layout"] = SequenceLayout.trusted(
        given["layout"].lengths, given["layout"].offsets, given["layout"].num_targets, 1, 3, 3, 2
    )
    with pytest.raises(ValueError, match="layout must hold no contextual tokens, they are in the cache"):
        hstu_attention_cached(**given)


@pytest.mark.parametrize("name", ["q", "v", "cache_k", "cache_v"])
def test_gradients_are_refused(name):
    given = arguments()
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="computes no gradients; call it under torch.no_grad"):
        hstu_attention_cached(**given)
    with torch.no_grad():
        hstu_attention_cached(**given)


def test_explain_answers_for_it():
    assert dict(explain("hstu_attention_cached", **arguments()).rows)["reference"].ok


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_batch_without_tokens(lengths):
    layout = SequenceLayout(torch.tensor(lengths, dtype=torch.int64))
    q, k, v = (torch.zeros(0, 2, width) for width in (3, 3, 4))
    bias = RelativeBias(torch.zeros(4), torch.zeros(4), *times(0)).with_cache(times(0)[0])
    out = hstu_attention_cached(q, k, v, layout, k, v, layout, scale_len=4, bias=bias)
    assert out.shape == (0, 2, 4)
