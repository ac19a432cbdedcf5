"""The Triton kernel of `hstu_attention_cached`: numbers, memory, sizes in any order, graphs.

The same tests run in the interpreter on a CPU and on a GPU, where they are also run with large inputs.
"""

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
from recsys.ops.hstu_attention.triton.block_sizes import Blocks
from tests.ops import harness, oracle
from tests.ops.attention import BIAS, large
from tests.ops.cases import MASKS, Cut, cut, layout_of, qkv, relative_bias, samples
from tests.ops.harness import Runner, runners
from tests.ops.hstu_attention.cached.test_cached_export import BATCHES, Scorer, exported, inputs
from tests.tools.interpreter import INTERPRETED, WithNumbersOnly, between_poison, interpreted

# Caches and new tokens inside a tile, over several, odd, empty; the last sample has nothing new.
SHAPES = [(29, 5), (0, 3), (0, 0), (23, 0), (12, 19), (9, 0)]
CUTS = {"ragged": [13, 0, 0, 22, 12, 9], "nothing cached": [0] * 6, "all cached": [99] * 6}
DEVICE = "cuda"

everywhere = pytest.mark.parametrize("runner", runners("triton"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles a sample, several blocks a tile."""
    if not INTERPRETED:
        return
    from recsys.ops.hstu_attention.cached import triton_ops

    monkeypatch.setattr(triton_ops, "blocks_for", lambda *_: Blocks(16, 8, 4, 1))


def on_device(parts: Cut, device) -> Cut:
    return Cut(parts.layout.to(device), parts.cache_layout.to(device), parts.is_cached.to(device))


def in_float32(parts: Cut, tensors, bias, runner: Runner):
    """Arguments for the kernel: float32, in the interpreter between rows of poison."""

    def placed(tensor):
        tensor = tensor.to(runner.device)
        return between_poison(tensor) if runner.is_interpreted else tensor

    arguments = [
        value.to(runner.device) if isinstance(value, SequenceLayout) else placed(value.float())
        for value in parts.arguments(*tensors)
    ]
    if bias is not None:
        exact = parts.bias(bias)
        tables = (exact.position_table, exact.time_table)
        times = (exact.timestamps, exact.next_timestamps, exact.cache_timestamps)
        bias = CachedRelativeBias(*(t.float().to(runner.device) for t in tables), *map(placed, times))
    return arguments, bias


def check(runner, batch, num_cached, mask, *, dim=3, v_dim=2, heads=1, bias_rows=0, alpha=None, loops=False):
    """Against float64: the reference of whole samples, or the loops."""
    whole, parts = layout_of(batch), cut(batch, num_cached)
    tensors = [tensor.detach() for tensor in qkv(whole.total_len, heads=heads, dim=dim, v_dim=v_dim)]
    bias = relative_bias(whole.total_len, rows=bias_rows) if bias_rows != 0 else None
    arguments, new_bias = in_float32(parts, tensors, bias, runner)
    out = hstu_attention_cached(*arguments, mask, alpha=alpha, scale_len=7, bias=new_bias, backend="triton")
    assert last_backend("hstu_attention_cached") == "triton"
    if loops:
        expected = oracle.hstu(*tensors, batch, mask, dim**-0.5 if alpha is None else alpha, 7, bias)
    else:
        expected = hstu_attention(
            *tensors, whole, mask, alpha=alpha, scale_len=7, bias=bias, backend="reference"
        )
    # Products in three passes of TF32 on a GPU are not as near as the interpreter's.
    close = 2e-5 if runner.is_interpreted else 1e-4
    torch.testing.assert_close(out.double().cpu(), parts.new(expected), rtol=close, atol=close)


MASK_CASES = [(mask, 3 * (i % 2), "ragged") for i, mask in enumerate(MASKS[1::5])]
MASK_CASES += [(mask, 3, cached) for mask in MASKS[1::25] for cached in ("nothing cached", "all cached")]


@everywhere
@pytest.mark.parametrize(("mask", "contextual", "cached"), MASK_CASES, ids=str)
def test_new_tokens_get_their_rows_of_the_whole(mask, contextual, cached, runner):
    """Ragged caches meet all masks; caches of nothing and of everything do not depend on the mask."""
    check(runner, samples(contextual, SHAPES), CUTS[cached], mask)


@everywhere
@pytest.mark.parametrize(("mask", "rows"), list(zip(MASKS[3::9], [None, 2] * 3, strict=False)), ids=str)
def test_bias(mask, rows, runner):
    check(runner, samples(1, SHAPES), CUTS["ragged"], mask, heads=rows or 1, bias_rows=rows)


@everywhere
@pytest.mark.parametrize("mask", [AttentionMask(4, 3, True, 11), AttentionMask(target_group_size=3)], ids=str)
def test_against_the_loops(mask, runner):
    """The other definition, with groups longer than a tile."""
    check(runner, samples(2, [(21, 13), (7, 0), (9, 3)]), [17, 3, 9], mask, bias_rows=1, loops=True)


@everywhere
@pytest.mark.parametrize(
    ("mask", "rows", "parts"),
    list(zip(MASKS[1::6], [0, 2, None] * 3, [2, 8] * 4, strict=False)),
    ids=str,
)
def test_keys_in_parts(mask, rows, parts, monkeypatch, runner):
    """Parts of several blocks, of one and of none; sums that nobody has written would be NaN."""
    from recsys.ops.hstu_attention.cached import triton_ops

    monkeypatch.setattr(triton_ops, "num_parts", lambda *_: parts)
    batch, num_cached = samples(2, [(45, 5), *SHAPES]), [43, *CUTS["ragged"]]
    check(runner, batch, num_cached, mask, heads=2, bias_rows=rows)


@everywhere
@pytest.mark.parametrize(("dim", "v_dim", "alpha"), [(16, 5, 0.0), (24, 16, -0.7), (1, 33, None)])
def test_other_dimensions_and_alphas(dim, v_dim, alpha, runner):
    check(
        runner,
        samples(0, SHAPES),
        CUTS["ragged"],
        AttentionMask(),
        dim=dim,
        v_dim=v_dim,
        heads=3,
        alpha=alpha,
    )


@interpreted
def test_float16():
    """At most twice as far from float64 as the reference in float16. The interpreter lacks bfloat16."""
    batch, mask = samples(3, SHAPES), AttentionMask(5, 4, True, 3)
    parts = cut(batch, CUTS["ragged"])
    half = [t.detach().half() for t in qkv(sum(sample.length for sample in batch), dim=16, v_dim=7)]
    ours, theirs, exact = (
        hstu_attention_cached(*parts.arguments(*tensors), mask, scale_len=64, backend=backend)
        for backend, tensors in (
            ("triton", half),
            ("reference", half),
            ("reference", [tensor.double() for tensor in half]),
        )
    )
    assert ours.dtype == torch.float16
    assert (ours.double() - exact).norm() < 2 * (theirs.double() - exact).norm()


@interpreted
def test_nothing_is_written_past_the_last_row(monkeypatch):
    batch = samples(1, SHAPES[::-1])
    parts = cut(batch, CUTS["ragged"][::-1])
    tensors = [t.detach().float() for t in qkv(sum(sample.length for sample in batch))]
    with harness.guarded_memory(monkeypatch):
        hstu_attention_cached(*parts.arguments(*tensors), scale_len=7, backend="triton")


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
    tensors = [tensor.detach().float() for tensor in qkv(sum(sample.length for sample in batch))]
    clean = hstu_attention_cached(*parts.arguments(*tensors), scale_len=8, backend="triton")
    for tensor in tensors:
        tensor[16:28] = float("nan")
    out = hstu_attention_cached(*parts.arguments(*tensors), scale_len=8, backend="triton")
    assert torch.equal(out[:12], clean[:12]) and torch.equal(out[18:], clean[18:])
    assert out[12:18].isnan().all()


@interpreted
def test_the_library_op_in_the_interpreter(monkeypatch):
    """Its schema and shapes without numbers: a compiler relies on them. D != V, a strided input."""
    from recsys.ops.hstu_attention.cached import triton_ops

    monkeypatch.setattr(SequenceLayout, "host_copy", None)  # as if the lengths were on a device
    monkeypatch.setattr(triton_ops, "wrap_triton", WithNumbersOnly)
    for batch in (samples(1, SHAPES), samples(1, [(0, 0)])):
        parts = cut(batch, CUTS["ragged"][: len(batch)])
        tensors = [t.detach().float() for t in qkv(sum(sample.length for sample in batch), dim=3, v_dim=5)]
        q, k, v, layout, cache_k, cache_v, cached = parts.arguments(*tensors)
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


test_the_kernel_in_the_interpreter = harness.interpreter_test(__file__)


class Case:
    """A whole batch on the GPU, and the same batch cut into a cache and new tokens."""

    def __init__(self, shapes, contextual, dim, v_dim, dtype, bias_rows=0, heads=2):
        batch = samples(contextual, [(cached + new, targets) for cached, new, targets in shapes])
        self.whole = layout_of(batch).to(DEVICE)
        self.parts = on_device(cut(batch, [cached for cached, *_ in shapes]), DEVICE)
        whole = [(sample.uih, sample.targets) for sample in batch]
        given = large(whole, contextual, (dim, v_dim), dtype, bias_rows, heads=heads)
        given = harness.on_device(given, Runner("triton", DEVICE))
        self.inputs = [given.tensors[name] for name in "qkv"]
        both = given.tensors | given.options
        self.bias = None if bias_rows == 0 else RelativeBias(*(both[name] for name in BIAS))

    def cached(self, mask, backend="triton"):
        bias = None if self.bias is None else self.parts.bias(self.bias)
        out = hstu_attention_cached(
            *self.parts.arguments(*self.inputs), mask, scale_len=64, bias=bias, backend=backend
        )
        assert last_backend("hstu_attention_cached") == backend
        return out

    def uncached(self, mask, dtype):
        """The reference's rows of the new tokens in whole samples."""
        bias = self.bias
        if bias is not None:
            tables = (bias.position_table.detach().to(dtype), bias.time_table.detach().to(dtype))
            bias = RelativeBias(*tables, bias.timestamps, bias.next_timestamps)
        inputs = [tensor.to(dtype) for tensor in self.inputs]
        out = hstu_attention(*inputs, self.whole, mask, scale_len=64, bias=bias, backend="reference")
        return self.parts.new(out)


def assert_near(case, mask):
    """Not further from float64 than twice the uncached reference in the same type."""
    got, dtype = case.cached(mask), case.inputs[0].dtype
    exact = case.uncached(mask, torch.float64)
    allowed = 2 * (case.uncached(mask, dtype).double() - exact).norm()
    assert torch.isfinite(got).all()
    assert (got.double() - exact).norm() <= allowed + 1e-5 * exact.norm() + 1e-12


@pytest.mark.gpu
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=st.data())
def test_random_layouts(data):
    sizes = st.tuples(st.integers(0, 400), st.integers(0, 150), st.integers(0, 150))
    shapes = data.draw(st.lists(sizes, min_size=1, max_size=5), "cached, new, targets")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    dim, v_dim = data.draw(st.tuples(*[st.sampled_from([16, 33, 64, 128, 200, 256])] * 2))
    mask = data.draw(st.sampled_from([*MASKS, AttentionMask(130, 70, True, 5)]))
    rows = data.draw(st.sampled_from([0, 0, None, 2]))
    assert_near(Case(shapes, data.draw(st.sampled_from([0, 1, 6])), dim, v_dim, dtype, rows), mask)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_few_users_with_long_histories(dim, dtype, rows, monkeypatch):
    """Keys are summed up in parts, to the same bits each time."""
    from recsys.ops.hstu_attention.cached import triton_ops

    chosen, number = [], triton_ops.num_parts
    monkeypatch.setattr(triton_ops, "num_parts", lambda *facts: chosen.append(number(*facts)) or chosen[-1])
    case = Case([(4001, 0, 70), (30, 2, 1), (2500, 0, 3)], 3, dim, dim, dtype, rows)
    for mask in (AttentionMask(), AttentionMask(130, 70, True, 5)):
        assert_near(case, mask)
        assert torch.equal(case.cached(mask), case.cached(mask))
    assert min(chosen) > 1


@pytest.mark.gpu
def test_other_sizes_in_any_order_use_one_artefact_and_stay_right():
    from recsys.ops.hstu_attention.cached.triton_ops import cached_kernel

    sizes = [(0, 1), (1, 0), (7, 5), (512, 256), (2048, 1), (4097, 300)]
    cases = [Case([(cached, 0, new), (cached, new, 0)], 0, 64, 64, torch.bfloat16) for cached, new in sizes]
    expected = [case.cached(AttentionMask()) for case in cases]
    for case in cases:
        assert_near(case, AttentionMask())
    before = harness.artefacts(cached_kernel)
    rapid = [(i, cases[i].cached(AttentionMask())) for n in range(40) for i in (5, n % 5, 0, 3, 1)]
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected[i]) for i, got in rapid)
    assert harness.artefacts(cached_kernel) == before


@pytest.mark.gpu
def test_the_cache_is_not_copied_and_nothing_waits_for_the_device():
    # Few new tokens: the sums of parts of the cached keys, of all new rows each, are small beside the cache.
    case = Case([(4000, 0, 16)] * 4, 3, 128, 128, torch.bfloat16, bias_rows=4, heads=4)
    arguments = case.parts.arguments(*case.inputs)
    bias, mask = case.parts.bias(case.bias), AttentionMask(window=256, prefix=9)

    def attend():
        return hstu_attention_cached(*arguments, mask, scale_len=64, bias=bias, backend="triton")

    expected = attend()
    arguments = (*arguments[:3], case.parts.layout.to(DEVICE), *arguments[4:])  # a layout not seen before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with harness.no_waiting():
        out = attend()
    assert torch.equal(out, expected)
    assert torch.cuda.max_memory_allocated() - held < arguments[4].nbytes / 4


@pytest.mark.gpu
def test_poisoned_memory_and_neighbours():
    torch.use_deterministic_algorithms(True)
    try:
        case = Case([(300, 9, 0), (0, 0, 0), (65, 0, 20), (5, 0, 0)], 2, 64, 32, torch.bfloat16, 2)
        clean = case.cached(AttentionMask())
        arguments = list(case.parts.arguments(*case.inputs))
        for place, value in enumerate(arguments):
            if isinstance(value, SequenceLayout):
                continue
            poisoned = value.new_full((value.shape[0] + 512, *value.shape[1:]), float("nan"))
            poisoned[256:-256] = value
            arguments[place] = poisoned[256:-256]
        bias = case.parts.bias(case.bias)
        out = hstu_attention_cached(*arguments, scale_len=64, bias=bias, backend="triton")
        assert torch.equal(out, clean)
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(batch):
    return tuple(tensor.to(DEVICE) for tensor in batch)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["compile", "export"])
def test_one_graph_for_all_sizes(how):
    model = Scorer(backend="triton").eval().to(DEVICE)
    batches = [on_gpu(inputs(shapes, spare)) for spare, shapes in enumerate(BATCHES)]
    with torch.no_grad():
        if how == "compile":
            made = torch.compile(model, dynamic=True, fullgraph=True)
        else:
            made = exported(model, batches[0]).module()
        for batch in batches:
            torch.testing.assert_close(made(*batch), model(*batch))


@pytest.mark.gpu
def test_the_library_op():
    from recsys.ops.hstu_attention.cached.triton_ops import hstu_attention_cached_triton

    case = Case([(40, 3, 9), (0, 0, 0), (7, 0, 30)], 1, 64, 32, torch.bfloat16, bias_rows=2)
    q, k, v, layout, cache_k, cache_v, cached = case.parts.arguments(*case.inputs)
    bias: CachedRelativeBias = case.parts.bias(case.bias)
    lengths = (layout.lengths, layout.offsets, layout.num_targets, cached.lengths, cached.offsets)
    of_bias = (bias.position_table, bias.time_table, bias.timestamps, bias.next_timestamps)
    for more in ((*of_bias, bias.cache_timestamps), (None,) * 5):
        torch.library.opcheck(
            hstu_attention_cached_triton,
            (q, k, v, cache_k, cache_v, *lengths, *more, 1, 3, 2, False, 2, True, 0.5, 8.0),
        )
