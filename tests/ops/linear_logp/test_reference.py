"""`linear_logp` on a CPU: special scores and targets, and what it must refuse."""

import dataclasses

import pytest
import torch

from recsys.ops import linear_logp, linear_lse
from recsys.ops.linear_logp import reference, supports_sm90
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import SUPPORTED
from tests.ops import harness
from tests.ops.harness import assert_close, assert_equal, gradients, normal
from tests.ops.linear_logp.problems import IGNORED, arguments_of, leaves_of, problem


def test_nothing_left_is_no_gradient():
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    ids, target_ids = torch.tensor([5, 5, 5, 5]), torch.tensor([5, 6])
    lse = linear_lse(hidden, weight, candidate_ids=ids, target_ids=target_ids)
    assert lse[0] == -torch.inf and lse[1].isfinite()
    lse.backward(torch.ones(2))
    assert not hidden.grad[0].any() and hidden.grad[1].all() and weight.grad.isfinite().all()


def test_a_bias_of_minus_infinity_leaves_a_candidate_out():
    given = problem(9, 8, 3, ids=False)
    given.options["target"].clamp_(max=6)
    given.tensors["bias"][7] = -torch.inf
    fewer = given.tensors | {name: given.tensors[name][:7] for name in ("weight", "bias")}
    outputs, leaves = harness.call(given, harness.REFERENCE)
    wanted, wanted_leaves = harness.call(dataclasses.replace(given, tensors=fewer), harness.REFERENCE)
    assert_close(outputs, wanted, 1e-12)
    grads = dict(zip(given.tensors, gradients(outputs, leaves), strict=True))
    assert not grads["weight"][7].any() and grads["bias"][7] == 0
    grads |= {name: grads[name][:7] for name in ("weight", "bias")}
    assert_close(list(grads.values()), gradients(wanted, wanted_leaves), 1e-12)


def test_bfloat16_is_widened_before_the_first_product():
    given = problem(40, 70, 24).cast(torch.bfloat16)
    got, want = (
        harness.results(given.cast(dtype), harness.REFERENCE) for dtype in (torch.bfloat16, torch.float64)
    )
    assert_close(got[:2], want[:2], 1e-5)
    for ours, exact in zip(got[2:], want[2:], strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, exact.bfloat16(), rtol=2**-7, atol=1e-4)


def test_huge_scores_do_not_overflow():
    hidden = torch.tensor([[1e5], [-1e5]], requires_grad=True)
    logp, lse = linear_logp(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]))
    torch.testing.assert_close(logp, torch.tensor([0.0, -2e5]))
    torch.testing.assert_close(lse, torch.tensor([1e5, 1e5]))
    (logp.sum() + lse.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_ignored_rows_move_nothing_whatever_comes_from_above():
    given = arguments_of(problem(9, 8, 3))
    out = linear_logp(**given)
    ignored = given["target"] == IGNORED
    upstream = normal(9).masked_fill(ignored, torch.nan)
    (gradient,) = torch.autograd.grad([out.logp, out.lse], given["hidden"], [upstream, upstream])
    assert not gradient[ignored].any() and gradient[~ignored].all()
    assert not out.logp[ignored].any() and out.logp[~ignored].all()


def test_a_class_of_the_weight_can_be_ignored():
    logp = linear_logp(torch.randn(3, 2), torch.randn(4, 2), torch.tensor([0, 1, 0]), ignore_index=0).logp
    assert (logp == 0).tolist() == [True, False, True]


def test_backward_keeps_a_few_numbers_a_row(monkeypatch):
    monkeypatch.setitem(reference.BLOCK_SCORES, "cpu", 100)
    given = arguments_of(problem(50, 30, 4))
    inputs = {leaf.data_ptr() for leaf in leaves_of(given)}
    saved = []

    def pack(tensor):
        if tensor.data_ptr() not in inputs:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logp(**given)
    assert saved and max(saved) <= 50


def test_autocast_does_not_reach_the_scores():
    given = arguments_of(problem(9, 8, 3).cast(torch.float32))
    plain = linear_logp(**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_logp(**given)
        grads = gradients(inside, leaves_of(given))
    assert_equal([*inside, *grads], [*plain, *gradients(plain, leaves_of(given))])


def arguments(**changes):
    given = {"hidden": torch.zeros(5, 6), "weight": torch.zeros(9, 6), "target": torch.arange(5)}
    return given | changes


LONG = torch.zeros(5, dtype=torch.int64)
WRONG = [
    ({"hidden": torch.zeros(5, 2, 3)}, ValueError, r"hidden must have shape .* got \(5, 2, 3\)"),
    ({"hidden": torch.zeros(5, 6, dtype=torch.int64)}, TypeError, "hidden must be a floating point tensor"),
    ({"weight": None}, TypeError, "weight must be a floating point tensor, got NoneType"),
    ({"weight": torch.zeros(9, 5)}, ValueError, "weight must have the width of hidden, 6, got 5"),
    ({"weight": torch.zeros(9, 6).half()}, TypeError, "weight must have the dtype of hidden, torch.float32"),
    ({"weight": torch.zeros(9, 6, device="meta")}, ValueError, "weight is on meta, hidden on cpu"),
    ({"target": LONG.int()}, TypeError, "target must be an int64 tensor, got a tensor of torch.int32"),
    ({"target": LONG[:4]}, ValueError, r"target must have shape \[5\], the rows of hidden, got \(4,\)"),
    ({"target": LONG.to("meta")}, ValueError, "target is on meta, hidden on cpu"),
    (
        {"target": LONG - 1},
        ValueError,
        "target of row 0 is -1, which is not a row of weight: allowed are 0 to 8",
    ),
    ({"target": LONG + 9}, ValueError, "target of row 0 is 9, .* ignore_index = -100"),
    ({"target": torch.tensor([0, 8, -100, 9, -2])}, ValueError, "target of row 3 is 9"),
    ({"bias": torch.zeros(6)}, ValueError, r"bias must have shape \[9\], the rows of weight, got \(6,\)"),
    ({"bias": LONG}, TypeError, "bias must be a floating point tensor"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive and finite, got 0"),
    ({"temperature": torch.tensor(-1.0)}, ValueError, "temperature must be above 0, got -1.0"),
    ({"temperature": torch.ones(2)}, ValueError, r"temperature must hold one number, got shape \(2,\)"),
    ({"target_ids": LONG}, ValueError, "candidate_ids and target_ids belong together"),
    ({"candidate_ids": LONG, "target_ids": LONG}, ValueError, r"candidate_ids must have shape \[9\]"),
    ({"ignore_index": None}, TypeError, "ignore_index must be an int, got NoneType"),
]


test_wrong_arguments_are_named = harness.refused(linear_logp, arguments, WRONG)


@pytest.mark.parametrize(
    ("items", "width", "auto"), [(131_072, 128, True), (131_071, 128, False), (10**6, 16, False)]
)
def test_auto_leaves_small_catalogues_to_triton(items, width, auto, monkeypatch):
    """Below 2^24 entries of the weight; who names the backend gets it."""
    monkeypatch.setattr(triton_support, "missing_for_hopper", lambda: "")
    monkeypatch.setattr(triton_support, "support", lambda device, dtype: SUPPORTED)
    given = (torch.empty(7, width, device="meta"), torch.empty(items, width, device="meta"))
    target = torch.empty(7, dtype=torch.int64, device="meta")
    facts = harness.facts_of(linear_logp, *(rows.bfloat16() for rows in given), target)
    support = supports_sm90(dataclasses.replace(facts, device="cuda"))
    assert (support.ok, support.auto) == (True, auto)
