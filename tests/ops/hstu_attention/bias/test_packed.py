"""The bias by inline assembly: Triton's interpreter around `tests.tools.ptx` on a CPU, and a Hopper GPU."""

import itertools
import sys
from collections import defaultdict

import pytest
import torch

from recsys.ops import AttentionMask, RelativeBias, SequenceLayout
from recsys.ops.hstu_attention import Problem
from tests.ops import harness
from tests.ops.attention import BIAS, assert_near, large, with_neighbours
from tests.ops.cases import layout_of, samples
from tests.ops.harness import Runner
from tests.tools.interpreter import interpreted

INTERPRETER, ON_GPU = Runner("triton", "cpu"), Runner("triton", "cuda")
DIMS = (64, 64)

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


def on_a_gpu(test):
    """Mark a test that needs a Hopper GPU."""
    return pytest.mark.gpu(harness.needs_hopper(test))


# Two heads have a table each or share one; kinds of times and masks are tried with one head.
CASES = [
    ("hours", [(66, 9)], 0, 2, AttentionMask()),
    ("years", [(66, 4), (0, 0), (0, 3)], 1, None, AttentionMask(130, 70, True, 5)),
    ("anywhere", [(66, 3)], 3, 1, AttentionMask(window=40)),
    ("missing", [(63, 1), (1, 1), (66, 0)], 0, 1, AttentionMask(None, 0, False, 3, False)),
    ("backward", [(70, 0)], 6, 1, AttentionMask()),
    ("minutes", [(130, 0)], 0, 1, AttentionMask(window=20, prefix=2)),
]
in_all_cases = pytest.mark.parametrize(("times", "shapes", "contextual", "rows", "mask"), CASES)


@interpreted
@in_all_cases
def test_output_and_gradients_in_the_interpreter(times, shapes, contextual, rows, mask):
    """In float16, which the interpreter has: at most twice as far from float64; sums of 11 bits."""
    given = large(shapes, contextual, DIMS, torch.float16, rows, mask, times=times, heads=rows or 2)
    assert_near(given.with_options(deterministic=times == "backward"), INTERPRETER, floor=1e-3)


@pytest.fixture
def hopper_kernel(monkeypatch):
    """The Gluon kernel in the emulator, called for the cotangent of the harness; returns all gradients."""
    from recsys.ops.hstu_attention import triton as triton_launch
    from recsys.ops.hstu_attention.bias import hopper_kernel as biased_launch
    from recsys.ops.hstu_attention.hopper import forward
    from tests.tools.gluon_emulator import Emulated

    monkeypatch.setattr(triton_launch, "can_describe", lambda *_: True)
    monkeypatch.setattr(forward, "CACHED_BYTES", 100 * 2 * DIMS[0] * 8)  # several sections
    monkeypatch.setattr(triton_launch, "missing_for_hopper", lambda: "")
    monkeypatch.setattr(biased_launch, "biased_kernel", Emulated(biased_launch.biased_kernel))

    def gradients(given):
        options, tensors = given.options, [tensor.detach() for tensor in given.tensors.values()]
        bias = RelativeBias(*tensors[3:], *(options[name] for name in BIAS[2:]))
        problem = Problem(options["layout"], options["mask"], DIMS[0] ** -0.5, 64.0, bias)
        cotangent = harness.normal(*tensors[2].shape, seed=100, dtype=torch.bfloat16).half()
        return triton_launch.backward(cotangent, *tensors[:3], problem, tables=True)

    return gradients


@interpreted
@in_all_cases
def test_gradients_of_the_gluon_kernel(times, shapes, contextual, rows, mask, hopper_kernel):
    """As near as above."""
    given = large(shapes, contextual, DIMS, torch.float16, rows, mask, times=times, heads=rows or 2)
    _, *theirs = harness.results(given, harness.REFERENCE)
    _, *exact = harness.results(given.cast(torch.float64), harness.REFERENCE)
    harness.assert_as_near(hopper_kernel(given), theirs, exact, floor=1e-3)


@interpreted
def test_lists_with_tiles_that_nobody_needs(monkeypatch):
    """Without lengths on the host, lists have as many tiles as there can be, and the last ones are empty."""
    shapes = [(60, 3), (5, 0)]
    given = large(shapes, 0, DIMS, torch.float16, 1, heads=1, times="hours")
    given = given.with_options(deterministic=True)
    expected = harness.results(given, INTERPRETER)
    monkeypatch.setattr(SequenceLayout, "host_copy", None)
    unread = layout_of(samples(0, shapes))
    computed = harness.results(given.with_options(layout=unread), INTERPRETER)
    harness.assert_equal(computed, expected)


test_the_kernels_in_the_interpreter = harness.interpreter_test(__file__)


def check(shapes, contextual, rows, times, dims, dtype, mask):
    from recsys.ops.hstu_attention.bias import packed

    given = harness.on_device(large(shapes, contextual, dims, dtype, rows, mask, times=times), ON_GPU)
    bias = RelativeBias(*((given.tensors | given.options)[name] for name in BIAS))
    assert packed.is_packed("rows", given.tensors["q"], given.tensors["v"], bias)
    for deterministic in (False, True):
        assert_near(given.with_options(deterministic=deterministic), ON_GPU)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_and_gradients(mask, dtype):
    for number, (shapes, contextual, rows) in enumerate(itertools.product(SHAPES, [0, 1, 6], [None, 2])):
        check(shapes, contextual, rows, KINDS[number % len(KINDS)], DIMS, dtype, mask)


@on_a_gpu
@pytest.mark.parametrize("dims", [(32, 32), (16, 64), (25, 25)], ids=str)
def test_heads_of_other_widths(dims):
    """Without the copy engine, and with less shared memory of Triton's own."""
    for number, shapes in enumerate(SHAPES):
        check(shapes, number % 2, 2, KINDS[number], dims, torch.bfloat16, MASKS[number % 2])


@on_a_gpu
def test_other_sizes_in_turn_between_rows_of_nan(monkeypatch):
    """Sums in any order: as near each time. In sections of about 1,000 tokens."""
    from recsys.ops.hstu_attention.bias import hopper_kernel as bias_hopper_launch
    from recsys.ops.hstu_attention.hopper import forward

    made = []

    def zero_sums(*arguments):
        made.append(original(*arguments))
        return made[-1]

    original = bias_hopper_launch.zero_sums
    monkeypatch.setattr(bias_hopper_launch, "zero_sums", zero_sums)
    monkeypatch.setattr(forward, "CACHED_BYTES", 2**20)
    shapes = [
        [(2048, 0)],
        [(1, 0)],
        [(300, 9), (0, 0), (65, 1)],
        [(70, 0), (999, 9), (63, 0), (2049, 0), (900, 0)],
    ]
    batches = []
    for number, shape in enumerate(shapes):
        given = harness.on_device(large(shape, number % 2, DIMS, torch.bfloat16, 2), ON_GPU)
        batches.append(with_neighbours(given.with_options(deterministic=False)))
    order = [i for n in range(12) for i in (3, n % 4, 0, 2, 1)]
    found = [(i, harness.results(batches[i], ON_GPU)) for i in order]
    torch.cuda.synchronize()
    assert len(made) == len(found)  # all were made by the one kernel
    first = dict(reversed(found))
    for given in batches:
        assert_near(given, ON_GPU)
    for i, got in found:
        for one, other in zip(got, first[i], strict=True):
            assert (one.double() - other.double()).norm() <= 2e-3 * other.double().norm()


def artefacts(kernels):
    """Count the compiled forms of each kernel that ran, started by Triton and the short way."""
    from recsys.ops.runtime import hopper_launch as runtime_hopper_launch

    short = [found.kernel for found in runtime_hopper_launch._COMPILED.values()]
    made = [
        (one.__name__, sum(len(cache[0]) for cache in one.device_caches.values()), short.count(one))
        for one in kernels
    ]
    return sorted(one for one in made if one[1:] != (0, 0))


@on_a_gpu
def test_one_artefact_of_each_kernel_for_all_sizes(monkeypatch):
    """Sizes go from small to large and back, in sections of about 1,000 tokens and without."""
    from triton import JITFunction

    from recsys.ops.hstu_attention.hopper import forward
    from recsys.ops.runtime import hopper_launch as runtime_hopper_launch

    unordered = {"bias_rows": 2, "deterministic": False}
    harness.results(large([(5, 0)], 0, DIMS, torch.bfloat16, **unordered), ON_GPU)
    modules = [module for name, module in sys.modules.items() if name.startswith("recsys.ops.")]
    kernels = {one for module in modules for one in vars(module).values() if isinstance(one, JITFunction)}
    for kernel in kernels:  # those that other tests have left
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(runtime_hopper_launch, "_COMPILED", {})
    monkeypatch.setattr(forward, "CACHED_BYTES", 2**20)
    several = [(70, 0), (999, 9), (63, 0), (0, 0), (900, 16)]
    for number, shapes in enumerate([*([(n, 0)] for n in (1, 7, 512, 2048, 4097)), several, [(16, 0)]]):
        assert_near(large(shapes, number % 2, DIMS, torch.bfloat16, **unordered), ON_GPU)
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


@on_a_gpu
@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_rows_that_no_descriptor_shows(mask):
    """With heads of 64 and steps that the copy engine does not take."""
    given = large([(900, 60), (5, 0), (64, 0)], 1, DIMS, torch.bfloat16, 2, mask, deterministic=False)
    given = harness.on_device(given, ON_GPU)
    for name in "qkv":
        given.tensors[name] = torch.nn.functional.pad(given.tensors[name], (1, 0))[:, :, 1:]
    assert_near(given, ON_GPU)
