"""The Triton kernel of `hstu_attention_cached` on a GPU: long histories, sizes in turn, memory, graphs."""

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, hstu_attention_cached
from tests.ops import harness
from tests.ops.attention import BIAS, CAUSAL, between_nan
from tests.ops.harness import Runner
from tests.ops.hstu_attention.cached.calls import assert_near, output
from tests.ops.hstu_attention.cached.test_cached_export import BATCHES, Scorer
from tests.ops.hstu_attention.cached.test_hstu_attention_cached import large_behind

pytestmark = pytest.mark.gpu

ON_GPU = Runner("triton", "cuda")


def case(shapes, *given, **rest):
    """`large_behind` on the GPU."""
    return harness.on_device(large_behind(shapes, *given, **rest), ON_GPU)


def split(new):
    """The positional arguments of `hstu_attention_cached`, less the mask; and the bias, if there is one."""
    parts, both = new.options["parts"].to("cuda"), new.tensors | new.options
    arguments = list(parts.arguments(*(both[name] for name in "qkv")))
    has_bias = "time_table" in both
    return arguments, parts.bias(RelativeBias(*(both[name] for name in BIAS))) if has_bias else None


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_few_users_with_long_histories(dim, dtype, rows, monkeypatch):
    """Keys are summed up in parts, to the same bits each time."""
    from recsys.ops.hstu_attention.cached import triton as triton_ops

    chosen, number = [], triton_ops.num_parts
    monkeypatch.setattr(triton_ops, "num_parts", lambda *facts: chosen.append(number(*facts)) or chosen[-1])
    shapes = [(4001, 0, 70), (30, 2, 1), (2500, 0, 3)]
    for mask in (CAUSAL, AttentionMask(130, 70, True, 5)):
        new = case(shapes, 3, (dim, dim), dtype, rows, mask)
        assert torch.equal(assert_near(new, ON_GPU), output(new, ON_GPU))
    assert min(chosen) > 1


def test_other_sizes_in_any_order_use_one_artefact_and_stay_right():
    from recsys.ops.hstu_attention.cached.triton import cached_kernel

    sizes = [(0, 1), (1, 0), (7, 5), (512, 256), (2048, 1), (4097, 300)]
    batches = [case([(kept, 0, new), (kept, new, 0)], 0, (64, 64), torch.bfloat16) for kept, new in sizes]
    expected = [assert_near(batch, ON_GPU) for batch in batches]
    given = [split(batch)[0] for batch in batches]
    before = harness.artefacts(cached_kernel)
    order = [i for n in range(40) for i in (5, n % 5, 0, 3, 1)]
    rapid = [(i, hstu_attention_cached(*given[i], scale_len=64, backend="triton")) for i in order]
    torch.cuda.synchronize()
    assert all(torch.equal(got, expected[i]) for i, got in rapid)
    assert harness.artefacts(cached_kernel) == before


def test_the_cache_is_not_copied_and_nothing_waits_for_the_device():
    # Few new tokens: the sums of parts of the cached keys, of all new rows each, are small beside the cache.
    new = case([(4000, 0, 16)] * 4, 3, (128, 128), torch.bfloat16, 4, heads=4)
    mask = AttentionMask(window=256, prefix=9)

    def attend():
        return hstu_attention_cached(*arguments, mask, scale_len=64, bias=bias, backend="triton")

    arguments, bias = split(new)
    expected = attend()
    arguments[3] = new.options["parts"].layout.to("cuda")  # a layout not seen before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with harness.no_waiting():
        out = attend()
    assert torch.equal(out, expected)
    assert torch.cuda.max_memory_allocated() - held < arguments[4].nbytes / 4


def test_poisoned_memory_and_neighbours():
    shapes = [(300, 9, 0), (0, 0, 0), (65, 0, 20), (5, 0, 0)]
    arguments, bias = split(case(shapes, 2, (64, 32), torch.bfloat16, 2))
    options = {"scale_len": 64, "bias": bias, "backend": "triton"}
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        clean = hstu_attention_cached(*arguments, **options)
        padded = [between_nan(value) if isinstance(value, torch.Tensor) else value for value in arguments]
        assert torch.equal(hstu_attention_cached(*padded, **options), clean)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("how", ["compile", "export"])
def test_one_graph_for_all_sizes(how):
    model = Scorer(backend="triton").eval().to("cuda")
    batches = [tuple(tensor.to("cuda") for tensor in batch) for batch in BATCHES]
    if how == "compile":
        made = torch.compile(model, dynamic=True, fullgraph=True)
    else:
        made = harness.exported(model, batches[0]).module()
    harness.assert_serves(made, model, batches)
