"""`hstu_attention` on a GPU, by Triton and Hopper: random layouts, sizes in any order, neighbours, graphs."""

import dataclasses
import random
from typing import NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys.ops import AttentionMask, SequenceLayout, explain, hstu_attention
from tests.ops import harness
from tests.ops.attention import CAUSAL, assert_near, large, with_neighbours
from tests.ops.cases import MASKS
from tests.ops.harness import Runner, results, runners

WIDTHS = (64, 128, 256)
EVERYTHING = AttentionMask(130, 70, True, 5)


def runs(**cases):
    """Parameters of a test: each backend with each of its cases, which are tuples."""
    params = []
    for backend, chosen in cases.items():
        (runner,) = runners(backend, interpreter=False)
        params += [
            pytest.param(
                *runner.values, *case, marks=runner.marks, id=f"{backend}-{'-'.join(map(str, case))}"
            )
            for case in chosen
        ]
    return params


by_width = pytest.mark.parametrize(
    ("runner", "dim"), runs(triton=[(64,)], sm90=[(width,) for width in WIDTHS])
)
on_hopper = pytest.mark.parametrize("runner", runners("sm90"))


@pytest.fixture(autouse=True)
def usable(request, monkeypatch):
    """Skips where Hopper's kernels cannot run. Their gradients come in one pass wherever they may."""
    runner = request.node.callspec.params["runner"]
    if runner.backend != "sm90":
        return
    given = harness.on_device(large([(5, 0)], 0, (64, 64), torch.bfloat16), runner)
    arguments = (*given.tensors.values(), given.options["layout"])
    support = dict(explain("hstu_attention", *arguments, scale_len=1).rows)["sm90"]
    if not support.ok:
        pytest.skip(support.reason)
    from recsys.ops.hstu_attention import hopper

    monkeypatch.setattr(hopper, "ONE_PASS_ABOVE", dict.fromkeys((64, 128), (-1, -1)))


def check(runner, *given, **rest):
    """Near float64, with gradients that have the same bits each time and without."""
    given = large(*given, **rest)
    for deterministic in (False, True):
        assert_near(given.with_options(deterministic=deterministic), runner)


class Form(NamedTuple):
    """Facts that kernels are compiled for, which takes many seconds."""

    dtype: torch.dtype
    dims: tuple[int, int]
    bias_rows: int | None
    mask: AttentionMask


def triton_forms(number: int) -> list[Form]:
    """Some of all combinations, drawn once and for all."""
    chosen = random.Random(5)
    dims = (16, 33, 64, 64, 128, 128, 200, 256)
    types = (torch.bfloat16, torch.float16, torch.float32)
    forms = []
    for i in range(number):
        dim = dims[i % len(dims)]
        v_dim = dim if i % 2 else chosen.choice(dims)
        mask = chosen.choice([*MASKS, EVERYTHING, CAUSAL])
        forms.append(Form(types[i % 3], (dim, v_dim), (0, 0, None, 2)[i // 2 % 4], mask))
    return forms


HOPPER_FORMS = [
    Form(dtype, (dim, dim), 0, mask)
    for dim, mask in (
        (64, EVERYTHING),
        (64, AttentionMask(window=200)),
        (128, CAUSAL),
        (128, EVERYTHING),
        (256, AttentionMask(window=200, contextual_reads_history=False)),
    )
    for dtype in (torch.bfloat16, torch.float16)
]
FORMS = runs(triton=[(form,) for form in triton_forms(24)], sm90=[(form,) for form in HOPPER_FORMS])


@pytest.mark.parametrize(("runner", "form"), FORMS)
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_random_layouts(form, runner, data):
    shapes = data.draw(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 150)), min_size=1, max_size=6))
    contextual = data.draw(st.sampled_from([0, 1, 6, 130]))
    check(runner, shapes, contextual, form.dims, form.dtype, form.bias_rows, form.mask)


@pytest.mark.parametrize("length", [64, 1, 65, 128, 129, 300, 1000, 4097])
@pytest.mark.parametrize("dim", WIDTHS)
@on_hopper
def test_one_causal_sample(runner, dim, length):
    check(runner, [(length, 0)], 0, (dim, dim), torch.bfloat16, heads=1)


@pytest.mark.parametrize("mask", [*MASKS[::3], AttentionMask(window=40, prefix=9), EVERYTHING], ids=str)
@on_hopper
def test_masks(runner, mask):
    shapes = [(150, 3), (0, 2), (0, 0), (260, 0), (1, 140), (20, 20)]
    check(runner, shapes, 3, (64, 64), torch.bfloat16, mask=mask)


@pytest.mark.parametrize("mask", [CAUSAL, AttentionMask(window=40, prefix=9), EVERYTHING], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@on_hopper
def test_masks_with_the_tiles_of_long_rows(runner, dim, mask, monkeypatch):
    from recsys.ops.hstu_attention.hopper import forward

    for many in ("MANY_KEYS", "MANY_IN_WINDOW"):
        monkeypatch.setattr(forward, many, 0)
    shapes = [(150, 3), (0, 2), (0, 0), (700, 0), (1, 140), (193, 20)]
    for contextual in (3, 70):
        check(runner, shapes, contextual, (dim, dim), torch.bfloat16, mask=mask)


@pytest.mark.parametrize(
    ("runner", "dim", "rows"), runs(triton=[(64, 0), (64, 2)], sm90=[(width, 0) for width in WIDTHS])
)
def test_deterministic_means_the_same_bits(runner, dim, rows):
    shapes = [(900, 60), (5, 0), (2000, 9), *[(700, 3), (0, 1), (33, 0)] * 20]
    given = harness.on_device(large(shapes, 3, (dim, dim), torch.bfloat16, rows), runner)
    first = results(given, runner)
    for _ in range(5):
        harness.assert_equal(results(given, runner), first)


@by_width
def test_other_sizes_in_any_order_use_one_artefact_and_stay_right(runner, dim):
    if runner.backend == "triton":
        from recsys.ops.hstu_attention.triton_kernels import forward_kernel
    else:
        from recsys.ops.hstu_attention.hopper.forward import forward_kernel

    ordered = runner.backend == "triton"  # Hopper's one pass sums dQ in any order
    sizes = [[(n, 0)] for n in (1, 7, 512, 2048, 4097)] + [[(700, 3), (0, 1), (33, 0)] * 20]
    problems = [
        harness.on_device(large(shapes, 0, (dim, dim), torch.bfloat16, deterministic=ordered), runner)
        for shapes in sizes
    ]
    expected = [assert_near(given, runner).ours for given in problems]
    before = harness.artefacts(forward_kernel)
    order = [i for n in range(40) for i in (5, n % 5, 0, 4, 1)]
    rapid = [(i, results(problems[i], runner)) for i in order]
    torch.cuda.synchronize()
    for i, (out, grad_q, *others) in rapid:
        want, want_q, *rest = expected[i]
        harness.assert_equal([out, *others], [want, *rest])
        tolerance = {"rtol": 0, "atol": 0} if ordered else {"rtol": 2**-7, "atol": 1e-5}
        torch.testing.assert_close(grad_q, want_q, **tolerance)
    assert harness.artefacts(forward_kernel) == before


@by_width
def test_a_sample_of_nan_leaves_its_neighbours_alone(runner, dim):
    given = large([(130, 3), (70, 2), (200, 0)], 2, (dim, dim), torch.bfloat16)
    clean = results(given, runner)
    start, end = given.options["layout"].offsets[1:3].tolist()
    for tensor in given.tensors.values():
        tensor[start:end] = torch.nan
    for before, after in zip(clean, results(given, runner), strict=True):
        assert torch.equal(before[:start], after[:start]) and torch.equal(before[end:], after[end:])


@pytest.mark.parametrize("runner", runners("triton", interpreter=False))
def test_poisoned_memory_and_neighbours(runner):
    given = harness.on_device(large([(300, 9), (0, 0), (65, 1)], 2, (64, 32), torch.bfloat16, 2), runner)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    try:
        harness.assert_equal(results(with_neighbours(given), runner), results(given, runner))
    finally:
        torch.use_deterministic_algorithms(False)


@on_hopper
def test_parts_of_one_projection_and_odd_strides(runner):
    given = harness.on_device(large([(300, 9), (65, 1)], 2, (64, 64), torch.bfloat16, heads=3), runner)
    q, k, v = given.tensors.values()
    whole = torch.cat([t.reshape(t.shape[0], -1) for t in (v, q, k)], 1)
    parts = [part.view(-1, 3, 64) for part in whole.split(192, 1)]
    odd = [torch.nn.functional.pad(t, (0, 1))[..., :64] for t in (q, k, v)]
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    want = results(given, runner)
    for tensors in ([parts[1], parts[2], parts[0]], odd, turned):
        strided = dataclasses.replace(given, tensors=dict(zip("qkv", tensors, strict=True)))
        harness.assert_equal(results(strided, runner), want)


class Attention(torch.nn.Module):
    """Attention as a compiler sees it: lengths are inputs."""

    def __init__(self, runner: Runner, deterministic: bool):
        super().__init__()
        self.options = {"backend": runner.backend, "deterministic": deterministic}
        self.mask = AttentionMask(window=40) if runner.backend == "triton" else CAUSAL

    def forward(self, q, k, v, lengths, offsets, num_targets):
        layout = SequenceLayout.trusted(lengths, offsets, num_targets, 2, q.shape[0], q.shape[0], q.shape[0])
        return hstu_attention(q * 1.0, k, v, layout, self.mask, scale_len=64, **self.options) * 2.0


def batches(runner, dim):
    for shapes in ([(70, 3), (5, 0)], [(3, 1)], [(400, 9), (0, 2), (33, 0)], [(900, 5)] * 40):
        given = harness.on_device(large(shapes, 2, (dim, dim), torch.bfloat16), runner)
        leaves = [tensor.requires_grad_() for tensor in given.tensors.values()]
        layout = given.options["layout"]
        yield *leaves, layout.lengths, layout.offsets, layout.num_targets


@pytest.mark.parametrize(
    ("runner", "deterministic", "widths"),
    runs(triton=[(True, (64,))], sm90=[(False, (64, 256, 64)), (True, (64, 256, 64))]),
)
def test_one_compiled_graph_for_all_sizes(runner, deterministic, widths):
    """And one for each width: the code for one is in PyTorch's cache on disk when the other is compiled."""
    for dim in widths:
        torch.compiler.reset()  # the limit of recompilations counts those of the other parameters too
        model = Attention(runner, deterministic)
        made = torch.compile(model, dynamic=True, fullgraph=True)
        for batch in batches(runner, dim):
            outs = [run(*batch) for run in (made, model)]
            pairs = [[out, *harness.gradients([out], batch[:3])] for out in outs]
            tolerance = {"rtol": 2**-7, "atol": 1e-5} if runner.backend == "sm90" else {}
            for got, want in zip(*pairs, strict=True):  # dQ of Hopper: sums in any order
                torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("runner", runners("triton", interpreter=False))
def test_one_exported_graph_for_all_sizes(runner):
    model = Attention(runner, deterministic=True)
    given = list(batches(runner, 64))
    harness.assert_serves(harness.exported(model, given[0]).module(), model, given)
