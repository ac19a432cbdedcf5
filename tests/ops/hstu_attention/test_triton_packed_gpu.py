"""The bias by inline assembly on Hopper: as near to float64 as the other kernels have to be."""

import gc
import itertools
import sys
from collections import defaultdict

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, hstu_attention
from tests.ops.hstu_attention.test_triton_gpu import assert_near, case, results
from tests.ops.hstu_attention.test_triton_packed_interpret import times_of

pytestmark = pytest.mark.gpu

MASKS = [
    AttentionMask(),
    AttentionMask(130, 70, True, 5),
    AttentionMask(window=40),
    AttentionMask(contextual_reads_history=False, target_group_size=3),
]
SHAPES = [
    [(900, 60), (5, 0), (0, 70), (64, 0)],
    [(63, 1), (1, 1), (300, 0)],
    [(2000, 9)],
    [(0, 0), (128, 64), (1, 0)],
]
KINDS = ["hours", "years", "minutes", "anywhere", "missing", "backward"]


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the assembly is for Hopper")


def check(shapes, contextual, rows, kind, dims, dtype, mask):
    from recsys.ops.hstu_attention.bias import packed_launch

    layout, q, k, v, bias = case(shapes, contextual, *dims, 2, dtype, rows)
    assert packed_launch.is_packed("rows", q, v, bias)
    times = times_of(kind, layout.total_len).cuda()
    tables = bias.position_table, bias.time_table
    bias = RelativeBias(*tables, times, torch.cat([times[1:], times[-1:] + 60]))
    for deterministic in (False, True):
        got = results(layout, q, k, v, bias, mask, "triton", deterministic)
        assert_near(got, (layout, q, k, v, bias), mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_and_gradients(mask, dtype):
    for number, (shapes, contextual, rows) in enumerate(itertools.product(SHAPES, [0, 1, 6], [None, 2])):
        check(shapes, contextual, rows, KINDS[number % len(KINDS)], (64, 64), dtype, mask)


@pytest.mark.parametrize("dims", [(32, 32), (16, 64), (25, 25)], ids=str)
def test_heads_of_other_widths(dims):
    """Without the copy engine, and with less shared memory of Triton's own."""
    for number, shapes in enumerate(SHAPES):
        check(shapes, number % 2, 2, KINDS[number], dims, torch.bfloat16, MASKS[number % 2])


def test_other_sizes_in_turn_between_rows_of_nan(monkeypatch):
    """Sums in any order: as near each time. In sections of about 1,000 tokens."""
    from recsys.ops.hstu_attention.bias import hopper_launch as bias_hopper_launch
    from recsys.ops.hstu_attention.hopper import launch as hopper_launch

    made = []

    def zero_sums(*arguments):
        made.append(original(*arguments))
        return made[-1]

    original = bias_hopper_launch.zero_sums
    monkeypatch.setattr(bias_hopper_launch, "zero_sums", zero_sums)
    monkeypatch.setattr(hopper_launch, "CACHED_BYTES", 2**20)
    shapes = [
        [(2048, 0)],
        [(1, 0)],
        [(300, 9), (0, 0), (65, 1)],
        [(70, 0), (999, 9), (63, 0), (2049, 0), (900, 0)],
    ]
    batches = []
    for number, shape in enumerate(shapes):
        layout, *tensors, bias = case(shape, number % 2, 64, 64, 2, torch.bfloat16, 2)
        for place, tensor in enumerate(tensors):
            padded = tensor.new_full((tensor.shape[0] + 512, *tensor.shape[1:]), float("nan"))
            padded[256:-256] = tensor.detach()
            tensors[place] = padded[256:-256].detach().requires_grad_()
        batches.append((layout, *tensors, bias))
    found = []
    for n in range(12):
        for i in (3, n % 4, 0, 2, 1):
            found.append((i, results(*batches[i], AttentionMask(), "triton", False)))
    torch.cuda.synchronize()
    assert len(made) == len(found)  # all were made by the one kernel
    first = dict(reversed(found))
    for i, got in first.items():
        assert_near(got, batches[i], AttentionMask())
    for i, got in found:
        for one, other in zip(got, first[i], strict=True):
            assert (one.double() - other.double()).norm() <= 2e-3 * other.double().norm()


def artefacts(kernels):
    """How many of each kernel that ran: Triton's, and those that are started the short way."""
    from recsys.ops.runtime import hopper_launch as runtime_hopper_launch

    short = [found.kernel for found in runtime_hopper_launch._COMPILED.values()]
    made = [
        (one.__name__, sum(len(cache[0]) for cache in one.device_caches.values()), short.count(one))
        for one in kernels
    ]
    return sorted(one for one in made if one[1:] != (0, 0))


def test_one_artefact_of_each_kernel_for_all_sizes(monkeypatch):
    """From a small one to a large one and back, in sections of about 1,000 tokens and without."""
    from triton import JITFunction

    from recsys.ops.hstu_attention.hopper import launch as hopper_launch
    from recsys.ops.runtime import hopper_launch as runtime_hopper_launch

    results(*case([(5, 0)], 0, 64, 64, 2, torch.bfloat16, 2), AttentionMask(), "triton", False)
    modules = [module for name, module in sys.modules.items() if name.startswith("recsys.ops.")]
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, JITFunction)}
    for kernel in kernels:  # those that other tests have left
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(runtime_hopper_launch, "_COMPILED", {})
    monkeypatch.setattr(hopper_launch, "CACHED_BYTES", 2**20)
    several = [(70, 0), (999, 9), (63, 0), (0, 0), (900, 16)]
    for number, shapes in enumerate([*([(n, 0)] for n in (1, 7, 512, 2048, 4097)), several, [(16, 0)]]):
        batch = case(shapes, number % 2, 64, 64, 2, torch.bfloat16, 2)
        assert_near(results(*batch, AttentionMask(), "triton", False), batch, AttentionMask())
    # Records and lists: of rows, of keys; lists also of keys in sections. What is prepared once for all
    # layers of a batch is started by Triton's own way.
    assert artefacts(kernels) == [
        ("biased_kernel", 1, 1),
        ("finish_kernel", 1, 1),
        ("forward_kernel", 1, 1),
        ("items_kernel", 3, 3),
        ("near_buckets_kernel", 1, 0),
        ("order_kernel", 1, 1),
        ("records_kernel", 2, 0),
        ("round_kernel", 1, 1),
        ("tables_kernel", 1, 1),
        ("times_kernel", 1, 0),
    ]


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_kernels_started_for_parts_of_the_items(mask, monkeypatch):
    """As where the records of all blocks would take too much memory."""
    from recsys.ops.hstu_attention.bias import launch as bias_launch

    made, original = [], bias_launch._records
    monkeypatch.setattr(bias_launch, "MOST_RECORD_BYTES", 0)
    monkeypatch.setattr(bias_launch, "SMALL_RECORDS", 2**12)
    monkeypatch.setattr(
        bias_launch, "_records", lambda *given: made.append(len(given[2])) or original(*given)
    )
    for number, (shapes, rows) in enumerate(itertools.product(SHAPES[::2], [None, 2])):
        check(shapes, 1, rows, KINDS[number], (64, 64), torch.bfloat16, mask)
    assert len(made) > 2 * 4 * 5  # more than one part for each kernel


def test_memory_of_a_token_is_the_same_for_long_samples(monkeypatch):
    """Of forward and backward, beyond what they are given; 65,536 tokens and 512. Records of all blocks would
    take 512 bytes a token."""
    from recsys.ops.hstu_attention.bias import launch as bias_launch

    monkeypatch.setattr(bias_launch, "SMALL_RECORDS", 0)

    def peak(length):
        layout, *leaves, bias = case([(length, 0), (length, 0)], 0, 64, 64, 1, torch.bfloat16, 1)
        cotangent = torch.randn_like(leaves[0])
        leaves += [bias.position_table, bias.time_table]
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        out = hstu_attention(*leaves[:3], layout, scale_len=length, bias=bias, backend="triton")
        torch.autograd.grad(out, leaves, cotangent)
        return (torch.cuda.max_memory_allocated() - held) / layout.total_len

    _, short, long = peak(512), peak(512), peak(2**16)
    assert 0 < long < 1.1 * short, (short, long)


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_rows_that_no_descriptor_shows(mask):
    """With heads of 64 and steps that the copy engine does not take."""
    layout, *tensors, bias = case([(900, 60), (5, 0), (64, 0)], 1, 64, 64, 2, torch.bfloat16, 2)
    for place, tensor in enumerate(tensors):
        wide = torch.zeros(tensor.shape[0], 2, 65, device="cuda", dtype=tensor.dtype)
        wide[:, :, 1:] = tensor.detach()
        tensors[place] = wide[:, :, 1:].detach().requires_grad_()
    got = results(layout, *tensors, bias, mask, "triton", False)
    assert_near(got, (layout, *tensors, bias), mask)


def test_deterministic_means_the_same_bits():
    arguments = case([(900, 60), (5, 0), (2000, 9)], 3, 64, 64, 2, torch.bfloat16, 2)
    first = results(*arguments, AttentionMask(), "triton")
    for _ in range(5):
        again = results(*arguments, AttentionMask(), "triton")
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
