"""The Triton kernel of `hstu_attention_cached` on a GPU: numbers, memory, sizes in any order, graphs."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import (
    AttentionMask,
    CachedRelativeBias,
    RelativeBias,
    SequenceLayout,
    hstu_attention,
    hstu_attention_cached,
    last_backend,
)
from tests.ops.cases import MASKS, cut, layout_of, relative_bias, samples
from tests.ops.hstu_attention.cached.test_cached_export import BATCHES, Scorer, exported, inputs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


class Case:
    """A whole batch on the GPU, and the same batch cut into a cache and new tokens."""

    def __init__(self, shapes, contextual, dim, v_dim, dtype, bias_rows=0, heads=2, seed=0):
        batch = samples(contextual, [(cached + new, targets) for cached, new, targets in shapes])
        self.whole = layout_of(batch).to(DEVICE)
        on_host = cut(batch, [cached for cached, *_ in shapes])
        self.parts = on_host._replace(
            layout=on_host.layout.to(DEVICE),
            cache_layout=on_host.cache_layout.to(DEVICE),
            is_cached=on_host.is_cached.to(DEVICE),
        )
        generator = torch.Generator().manual_seed(seed)
        self.inputs = [
            torch.randn(self.whole.total_len, heads, width, generator=generator).to(DEVICE, dtype)
            for width in (dim, dim, v_dim)
        ]
        self.bias = None
        if bias_rows != 0:
            host = relative_bias(self.whole.total_len, rows=bias_rows, seed=seed)
            tables = (table.detach().float().to(DEVICE) for table in (host.position_table, host.time_table))
            self.bias = RelativeBias(*tables, host.timestamps.to(DEVICE), host.next_timestamps.to(DEVICE))

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
            tables = (bias.position_table.to(dtype), bias.time_table.to(dtype))
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


def test_other_sizes_in_any_order_use_one_artefact_and_stay_right():
    from recsys.ops.hstu_attention.cached.triton_ops import cached_kernel

    sizes = [(0, 1), (1, 0), (7, 5), (512, 256), (2048, 1), (4097, 300)]
    cases = [Case([(cached, 0, new), (cached, new, 0)], 0, 64, 64, torch.bfloat16) for cached, new in sizes]
    expected = [case.cached(AttentionMask()) for case in cases]
    for case in cases:
        assert_near(case, AttentionMask())
    before = sum(len(cache[0]) for cache in cached_kernel.device_caches.values())
    rapid = [(i, cases[i].cached(AttentionMask())) for n in range(40) for i in (5, n % 5, 0, 3, 1)]
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected[i]) for i, got in rapid)
    assert sum(len(cache[0]) for cache in cached_kernel.device_caches.values()) == before


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
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)
    assert torch.cuda.max_memory_allocated() - held < arguments[4].nbytes / 4


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
