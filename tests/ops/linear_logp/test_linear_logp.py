"""`linear_logp` by every backend: the reference against the formulas, the kernels against float64."""

import dataclasses
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from recsys import protos as pb
from recsys.modules.losses.softmax import IGNORED as NO_TARGET
from recsys.modules.losses.softmax import SoftmaxLoss
from recsys.ops import last_backend, linear_logp, linear_lse
from recsys.ops.linear_logp import OP, norms_of, reference
from recsys.ops.linear_logp.recompute import SHORTEST
from tests.ops import harness
from tests.ops.harness import (
    REFERENCE,
    Case,
    OpTests,
    Runner,
    assert_close,
    assert_is,
    assert_near,
    normal,
    runners,
)
from tests.ops.linear_logp.problems import FLOATS, IGNORED, by_hand, problem, without_target
from tests.tools.interpreter import between_poison, interpreted

INTERPRETER, ON_GPU = Runner("triton", "cpu"), Runner("triton", "cuda")

everywhere = pytest.mark.parametrize("runner", runners("reference", "triton"))
on_gpus = pytest.mark.parametrize("runner", runners("triton", "sm90", interpreter=False))


def small_blocks(table):
    """Several tiles of both operands in the interpreter."""
    from recsys.ops.linear_logp.triton import Blocks

    return dict.fromkeys(table, dict.fromkeys((64, 128, 256, 512), Blocks(32, 16, 4, 1)))


SMALL = {"linear_logp.triton": dict.fromkeys(("FORWARD", "OF_HIDDEN", "OF_WEIGHT"), small_blocks)}


def check(given, runner, dtype=torch.float32, view=None):
    """Outputs and gradients: of the reference those of the formulas, of kernels near those of float64."""
    if runner == REFERENCE:
        assert_is(given, by_hand)
    else:
        floor = 2**-7 if dtype.itemsize == 2 else 1e-3
        assert_near(given.cast(dtype), runner, close=1e-4, floor=floor, absolute=1e-4, view=view)


FEW = [
    (9, 8, False, False),
    (9, 8, True, True),
    (1, 3, True, False),
    (4, 1, False, True),
    (2, 25, True, True),
]


@pytest.mark.parametrize("block", [1 << 19, 20], ids=["one block", "blocks"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("rows", "candidates", "bias", "ids"), FEW)
def test_the_reference_is_the_formulas(rows, candidates, bias, ids, normalized, block, monkeypatch):
    """All rows at once, and a row or two at a time. With a row of zeros, and a very short one."""
    monkeypatch.setitem(reference.BLOCK_SCORES, "cpu", block)
    given = problem(rows, candidates, 3, bias=bias, ids=ids, l2_normalize=normalized)
    if rows > 2:
        given.tensors["hidden"][2] = 0
        given.tensors["weight"][0] *= 1e-9
    assert_is(given, by_hand)
    if candidates > 1:  # else every candidate is a hit
        assert_is(without_target(given), by_hand)


@interpreted
@pytest.mark.parametrize(
    ("rows", "candidates", "width", "full", "split"),
    [
        (70, 100, 20, True, True),
        (70, 50, 20, False, False),
        (5, 33, 64, True, False),
        (64, 32, 16, False, True),
        (1, 1, 1, True, True),
    ],
)
def test_several_tiles_and_parts_of_tiles(rows, candidates, width, full, split, monkeypatch):
    """With everything optional and without; gradients of both operands in one launch and in two."""
    from recsys.ops.linear_logp import triton as triton_ops

    monkeypatch.setitem(triton_ops.SPLIT_WIDTH, 4, 128 if split else 0)
    check(problem(rows, candidates, width, bias=full, ids=full), INTERPRETER)


# (dtype, width, bias, ids): each is compiled for once, whatever the sizes.
VARIANTS = [
    (torch.bfloat16, 64, False, False),
    (torch.bfloat16, 50, True, True),
    (torch.float16, 128, False, True),
    (torch.float32, 50, True, False),
    (torch.float32, 128, True, True),
]
ON_HOPPER = [(torch.bfloat16, 64), (torch.float16, 72), (torch.bfloat16, 128), (torch.bfloat16, 256)]
ON_HOPPER += [(torch.float16, 264), (torch.bfloat16, 512), (torch.bfloat16, 50), (torch.float16, 100)]
RANDOM = [("triton", *variant) for variant in VARIANTS] + [
    ("sm90", *kind, False, False) for kind in ON_HOPPER
]


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "dtype", "width", "bias", "ids"), RANDOM)
@hypothesis.settings(max_examples=15)
@hypothesis.given(rows=st.integers(1, 3000), candidates=st.integers(1, 5000))
def test_random_sizes(backend, dtype, width, bias, ids, rows, candidates):
    if backend == "sm90" and not harness.is_hopper():
        pytest.skip("needs a Hopper GPU")
    given = problem(rows, candidates, width, bias=bias, ids=ids)
    given.tensors["hidden"] /= width**0.5
    check(given, Runner(backend, "cuda"), dtype)


@pytest.mark.parametrize("runner", runners("triton", "sm90"))
@pytest.mark.parametrize("width", [50, 128, 512])
@pytest.mark.parametrize("full", [False, True])
def test_rows_of_unit_length(width, full, runner):
    """With a row of zeros, and one shorter than what rows are divided by at least."""
    if runner.backend == "sm90" and full:
        pytest.skip("it adds no bias and knows no ids")
    size = (40, 70, 20) if runner.is_interpreted else (300, 2000, width)
    if runner.is_interpreted and width != 50:
        pytest.skip("one width is enough here")
    given = problem(*size, bias=full, ids=full, l2_normalize=True)
    given.tensors["hidden"][2] = 0
    given.tensors["weight"][5] *= 1e-9
    check(given, runner, torch.float32 if runner.is_interpreted else torch.bfloat16)
    if runner == ON_GPU and width < 512:
        check(given, runner, torch.float32)


@pytest.mark.parametrize("runner", runners("triton"))
@pytest.mark.parametrize("full", [False, True])
def test_sums_alone(full, runner):
    """No row has its target among the candidates; with ids, for a quarter of the rows nothing remains."""
    size = (40, 50, 9) if runner.is_interpreted else (300, 2000, 50)
    given = without_target(problem(*size, bias=full, ids=full, l2_normalize=full))
    if full:
        given.options["candidate_ids"][:] = 3
        given.options["target_ids"][:] = torch.arange(size[0]) % 4
    for dtype in (torch.float32,) if runner.is_interpreted else (torch.float32, torch.bfloat16):
        check(given, runner, dtype)


def exact(given):
    """Outputs and leaves in float64, by the formulas."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.tensors.items()}
    return by_hand(**leaves, **given.options), list(leaves.values())


@everywhere
@pytest.mark.parametrize("output", [0, 1])
def test_one_output_alone(output, runner):
    """The cotangents are expanded from one number, or strided."""
    given, gradients = problem(9, 8, 3), []
    for outputs, leaves in (harness.call(given.cast(torch.float32), runner), exact(given)):
        cotangent = normal(9, 3)[:, 1] if output else torch.ones(()).expand(9)
        gradients.append(torch.autograd.grad(outputs[output], leaves, cotangent.to(outputs[output])))
    assert_close(*gradients, 1e-4)


@everywhere
@pytest.mark.parametrize("name", FLOATS)
def test_one_gradient_alone(name, runner):
    def with_others_detached(**arguments):
        for rest in set(FLOATS) - {name}:
            arguments[rest] = arguments[rest].detach()
        return linear_logp(**arguments)

    given = problem(9, 8, 3)
    place = list(given.tensors).index(name)
    alone = dataclasses.replace(given.cast(torch.float32), function=with_others_detached)
    (outputs, leaves), (wanted, exact_leaves) = harness.call(alone, runner), exact(given)
    got, want = harness.gradients(outputs, [leaves[place]]), harness.gradients(wanted, [exact_leaves[place]])
    assert_close(got, want, 1e-4)


@pytest.mark.parametrize("runner", runners("triton", "sm90"))
def test_halves(runner):
    """The interpreter lacks bfloat16."""
    size = (40, 70, 24) if runner.is_interpreted else (300, 2000, 512)
    ids = runner.backend == "triton"
    given = problem(*size, bias=ids, ids=ids)
    given.tensors["hidden"] /= size[2] ** 0.5
    assert_near(given.cast(runner.half), runner, floor=1e-3 if runner.is_interpreted else 2**-7)


@pytest.mark.parametrize("runner", runners("reference", "triton", "sm90"))
def test_sure_targets_keep_their_gradient(runner):
    """Scores 10 against two of 0: 1 - p = 2 / (exp(10) + 2) = 9.08e-5, which 16 bits have no place for."""
    hidden = torch.eye(2, 16, dtype=runner.half, device=runner.device).requires_grad_()
    weight = 10 * torch.eye(3, 16, dtype=runner.half, device=runner.device)
    weight[2] = 0
    target = torch.tensor([0, 1], device=runner.device)
    logp, lse = linear_logp(hidden, weight, target, backend=runner.backend)
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    rest = 2 / (math.exp(10) + 2)
    assert logp.dtype == lse.dtype == torch.float32 and gradient.dtype == runner.half
    torch.testing.assert_close(logp.cpu(), torch.full((2,), math.log1p(-rest)), rtol=1e-3, atol=1e-6)
    expected = torch.tensor([[rest, -rest / 2], [-rest / 2, rest]]) * 10
    torch.testing.assert_close(gradient[:, :2].float().cpu(), expected, rtol=6e-3, atol=0)


@everywhere
@pytest.mark.parametrize(("rows", "candidates"), [(0, 6), (3, 0), (0, 0)])
def test_no_rows_and_no_candidates(rows, candidates, runner):
    given = problem(rows, max(candidates, 1), 2, ids=False)
    given.tensors["weight"], given.tensors["bias"] = torch.randn(candidates, 2), torch.randn(candidates)
    given.options["target"] = torch.full((rows,), IGNORED)
    outputs, leaves = harness.call(given.cast(torch.float32), runner)
    assert [tuple(out.shape) for out in outputs] == [(rows,), (rows,)]
    grads = torch.autograd.grad(sum(out.sum() for out in outputs), leaves)
    for leaf, gradient in zip(leaves, grads, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


@interpreted
def test_the_gradient_of_the_temperature_is_not_made_of_rounded_ones():
    """One row, one candidate: hidden's and the weight's gradient are rounded to three digits, the
    temperature's is d lse z / -temperature, once."""
    hidden, weight = (torch.full((1, 16), number, dtype=torch.float16) for number in (0.5, 0.75))
    temperature = torch.tensor(0.7, requires_grad=True)
    upstream = torch.tensor([1.000488])  # rounds to 1 in float16
    lse = linear_lse(hidden, weight, temperature=temperature, backend="triton")
    (gradient,) = torch.autograd.grad(lse, temperature, upstream)
    torch.testing.assert_close(gradient, -upstream[0] * 6 / 0.7**2, rtol=1e-6, atol=0)


@interpreted
@pytest.mark.parametrize("number", [1, 3])
def test_the_number_of_parts_changes_nothing_but_rounding(number, monkeypatch):
    from recsys.ops.linear_logp import triton as triton_ops

    given = problem(40, 90, 9).cast(torch.float32)
    want = harness.results(given, INTERPRETER)
    monkeypatch.setattr(triton_ops, "MAX_PARTS", number)
    assert_close(harness.results(given, INTERPRETER), want, 5e-5)


def library(device):
    from recsys.ops.linear_logp import triton as triton_ops

    for full in (False, True):
        given = harness.on_device(
            problem(40, 50, 9, ids=full, bias=full).cast(torch.float32), Runner("", device)
        )
        arguments = given.tensors | given.options
        arguments["target"].clamp_(min=-1)
        arguments["temperature"] = arguments["temperature"].reshape(1)
        names = ("hidden", "weight", "bias", "temperature", "target", "candidate_ids", "target_ids")
        operands = (*(arguments.get(name) for name in names), None, None)
        yield triton_ops.forward_op, operands, False
        upstream = (
            torch.randn(40, device=device),
            torch.randn(40, device=device),
            torch.ones(40, device=device),
        )
        for requested in ([True, True, full, True], [False, True, False, False]):
            yield triton_ops.backward_op, (*operands, *upstream, requested), False


TESTS = OpTests(
    compare=check,
    strided=Case(problem, 40, 50, 20),
    guarded=Case(problem, 40, 70, 20),
    library=library,
    wrapped=["linear_logp.triton"],
)


@interpreted
@pytest.mark.parametrize("stride", [20, 24])
def test_gradients_of_rows_through_their_unit_forms(stride):
    """With a row that is divided by a constant, and columns behind the last that count for nothing."""
    from recsys.ops.linear_logp import launch

    generator = torch.Generator().manual_seed(0)
    rows, grad = torch.randn(70, 20, generator=generator), torch.randn(70, stride, generator=generator)
    rows[3] = 1e-8
    rows.requires_grad_()
    unit = torch.nn.functional.normalize(rows, dim=1, eps=SHORTEST)
    (want,) = torch.autograd.grad(unit, rows, grad[:, :20])
    norms = norms_of(rows, rows)[0]
    got = launch.project(between_poison(grad), between_poison(rows.detach()), between_poison(norms))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


test_in_the_interpreter = harness.interpreter_test(__file__)


# --- on a GPU ---------------------------------------------------------------------------------------------


def plain(rows, candidates, width=64):
    """A loss over a catalogue in bfloat16: neither bias nor ids."""
    return problem(rows, candidates, width, bias=False, ids=False).cast(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [False, True])
def test_the_loss_of_a_retriever_in_bfloat16(drawn):
    """With the whole catalogue, or with candidates that were drawn."""
    targets = torch.randint(1000, (700,))
    targets[::9] = NO_TARGET
    tensors = {"queries": normal(700, 50), "items": normal(400 if drawn else 1000, 50, seed=1)}
    options = {"targets": targets, "l2_normalize": True}
    if drawn:
        tensors["positives"] = normal(700, 50, seed=2)
        options |= {"item_ids": torch.randint(1000, (400,)), "log_weights": torch.randn(400)}
    loss = SoftmaxLoss(pb.SoftmaxLoss(temperature=0.05))
    pairs = []
    for dtype, backend in ((torch.bfloat16, "triton"), (torch.float64, "reference")):
        leaves = {name: tensor.cuda().to(dtype).requires_grad_() for name, tensor in tensors.items()}
        moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        out = loss(**leaves, **moved)
        assert last_backend("linear_logp") == backend
        pairs.append([out.detach(), *harness.gradients([out], list(leaves.values()))])
    assert pairs[0][0].dtype == torch.float32
    for ours, want in zip(*pairs, strict=True):
        assert (ours.double() - want).norm() <= 2.0**-7 * want.norm()


@pytest.mark.gpu
@harness.needs_hopper
def test_auto_takes_the_fastest_that_can():
    def taken(given, **options):
        moved = harness.on_device(given, ON_GPU)
        linear_logp(**moved.tensors, **moved.options, **options)
        return last_backend("linear_logp")

    large, before = plain(30, 140_000, 128), OP.fallbacks.copy()
    assert taken(large) == taken(large, l2_normalize=True) == "sm90"
    assert taken(plain(30, 130_000, 128)) == "triton"
    assert OP.fallbacks == before
    biased = problem(30, 140_000, 128, ids=False).cast(torch.bfloat16)
    assert taken(biased) == "triton"
    assert OP.fallbacks - before == {("sm90", "it adds no bias"): 1}
    assert taken(problem(30, 40, 64, bias=False).cast(torch.bfloat16)) == "triton"
    for width, expected in ((64, "triton"), (65, "reference")):
        assert taken(problem(30, 40, width).cast(torch.float32)) == expected
    assert taken(plain(30, 40, 520)) == "reference"


@on_gpus
def test_wrong_targets_are_nan_and_write_nothing(runner):
    given = harness.on_device(plain(200, 300), runner)
    target = given.options["target"].clone()
    ignored = (target == IGNORED).nonzero()[:, 0]
    for row, number in zip(ignored.tolist(), (-1, 300, 2**40, -(2**40), 301), strict=False):
        target[row] = number
    right = harness.results(given, runner)
    got = harness.results(given.with_options(target=target), runner)
    assert torch.equal(got[0].isnan(), target != given.options["target"])
    got[0] = torch.where(got[0].isnan(), 0, got[0])
    harness.assert_equal(got, right)


@pytest.mark.gpu
def test_memory_is_that_of_the_inputs():
    """Scores of 2048 x 200,000 would be 780 MiB in bfloat16."""
    hidden, weight = (
        torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for rows in (2048, 200_000)
    )
    target = torch.randint(200_000, (2048,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_logp(hidden, weight, target, backend="triton").logp.sum().backward()
    beyond = torch.cuda.max_memory_allocated() - before - weight.grad.numel() * 2
    assert beyond < 64 * 2**20
