"""`linear_logp` on a CPU against its formulas, one score after the other, and what it must refuse."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from recsys.ops import explain, last_backend, linear_logp, linear_lse
from recsys.ops.linear_logp import hopper, logp_facts, reference
from recsys.ops.runtime.dispatch import SUPPORTED
from tests.ops.linear_logp.problems import IGNORED, by_hand, gradients, leaves_of, problem


@pytest.fixture(params=[1 << 19, 20], ids=["one block", "blocks"])
def blocks(request, monkeypatch):
    """All rows at once, and a row or two at a time."""
    monkeypatch.setitem(reference.BLOCK_SCORES, "cpu", request.param)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "candidates"), [(9, 8), (1, 3), (4, 1), (2, 25)])
def test_outputs_and_all_gradients_are_those_of_the_formulas(rows, candidates, bias, ids):
    given = problem(rows, candidates, 3, bias=bias, ids=ids)
    leaves = leaves_of(given)
    out = linear_logp(**given)
    assert last_backend("linear_logp") == "reference"
    expected = by_hand(given)
    for got, want in zip(out, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(out, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_gradients(output):
    given = problem(9, 8, 3)
    leaves = leaves_of(given)
    cotangent = torch.randn(9, dtype=torch.float64)
    pairs = [
        torch.autograd.grad(f[output], leaves, cotangent) for f in (linear_logp(**given), by_hand(given))
    ]
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "temperature"])
def test_one_gradient_alone(name):
    given = problem(9, 8, 3)
    leaf = given[name].requires_grad_()
    (want,), (got,) = (gradients(out, [leaf]) for out in (by_hand(given), linear_logp(**given)))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_lse_alone_leaves_out_every_hit():
    given = problem(9, 8, 3)
    target = given.pop("target")
    hits = given["target_ids"][:, None] == given["candidate_ids"]
    assert hits.any() and (target != IGNORED).any()
    scores = (given["hidden"] @ given["weight"].T + given["bias"]) / given["temperature"]
    leaves = leaves_of(given)
    want = torch.logsumexp(
        ((given["hidden"] @ given["weight"].T + given["bias"]) / 0.7).masked_fill(hits, -torch.inf), 1
    )
    got = linear_lse(**given)
    assert scores.shape == (9, 8)
    torch.testing.assert_close(got, want)
    cotangent = torch.randn(9, dtype=torch.float64)
    pairs = [torch.autograd.grad(out, leaves[:3], cotangent) for out in (got, want)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_nothing_left_is_no_gradient():
    hidden, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    ids, wanted = torch.tensor([5, 5, 5, 5]), torch.tensor([5, 6])
    lse = linear_lse(hidden, weight, candidate_ids=ids, target_ids=wanted)
    assert lse[0] == -math.inf and lse[1].isfinite()
    lse.backward(torch.ones(2))
    assert not hidden.grad[0].any() and hidden.grad[1].all() and weight.grad.isfinite().all()


def test_a_bias_of_minus_infinity_leaves_a_candidate_out():
    given = problem(9, 8, 3, ids=False)
    given["target"] = given["target"].clamp(max=6)
    fewer = {name: value.clone() for name, value in given.items()}
    fewer |= {"weight": fewer["weight"][:7], "bias": fewer["bias"][:7]}
    given["bias"][7] = -torch.inf
    outs, found = [], []
    for one in (given, fewer):
        leaves = leaves_of(one)
        outs.append(linear_logp(**one))
        found.append(gradients(outs[-1], leaves))
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want)
    hidden, weight, bias, temperature = found[0]
    assert not weight[7].any() and bias[7] == 0
    for got, want in zip((hidden, weight[:7], bias[:7], temperature), found[1], strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sure_targets_keep_their_gradient_in_any_type(dtype):
    """Scores 10 against two of 0: 1 - p = 2 / (exp(10) + 2) = 9.08e-5, which bfloat16 has no place for."""
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[10.0, 0.0], [0.0, 10.0], [0.0, 0.0]], dtype=dtype)
    logp, lse = linear_logp(hidden, weight, torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(logp.sum(), hidden)
    rest = 2 / (math.exp(10) + 2)
    assert logp.dtype == lse.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(logp, torch.full((2,), math.log1p(-rest)), rtol=1e-3, atol=0)
    expected = torch.tensor([[rest, -rest / 2], [-rest / 2, rest]]) * 10
    torch.testing.assert_close(gradient.float(), expected, rtol=4e-3, atol=0)


def test_bfloat16_is_widened_before_the_first_product():
    given = problem(40, 70, 24, dtype=torch.bfloat16)
    exact = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    out, want = linear_logp(**given), linear_logp(**exact)
    for one, other in zip(out, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    found, expected = [], []
    for one, gradient in ((given, found), (exact, expected)):
        leaves = leaves_of(one)
        gradient += gradients(linear_logp(**one), leaves)
    for got, right in zip(found, expected, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, right.bfloat16(), rtol=2**-7, atol=1e-4)


def test_huge_scores_do_not_overflow():
    hidden = torch.tensor([[1e5], [-1e5]], requires_grad=True)
    logp, lse = linear_logp(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]))
    torch.testing.assert_close(logp, torch.tensor([0.0, -2e5]))
    torch.testing.assert_close(lse, torch.tensor([1e5, 1e5]))
    (logp.sum() + lse.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_ignored_rows_move_nothing_whatever_comes_from_above():
    given = problem(9, 8, 3)
    hidden = given["hidden"].requires_grad_()
    out = linear_logp(**given)
    upstream = torch.randn(9, dtype=torch.float64)
    ignored = given["target"] == IGNORED
    upstream[ignored] = torch.nan
    (gradient,) = torch.autograd.grad([out.logp, out.lse], hidden, [upstream, upstream])
    assert not gradient[ignored].any() and gradient[~ignored].all()
    assert not out.logp[ignored].any() and out.logp[~ignored].all()


def test_a_class_of_the_weight_can_be_ignored():
    logp = linear_logp(torch.randn(3, 2), torch.randn(4, 2), torch.tensor([0, 1, 0]), ignore_index=0).logp
    assert (logp == 0).tolist() == [True, False, True]


def test_in_batch_negatives_of_one_another():
    """Every row's positive is a candidate of the others, unless it is the same item."""
    torch.manual_seed(3)
    users, items = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    ids = torch.tensor([4, 7, 4, 9, 7])
    logq = torch.rand(5, dtype=torch.float64).log()
    logp = linear_logp(users, items, torch.arange(5), bias=-logq, candidate_ids=ids, target_ids=ids).logp
    for i in range(5):
        scores = [users[i] @ items[j] - logq[j] for j in range(5) if j == i or ids[j] != ids[i]]
        want = users[i] @ items[i] - logq[i] - torch.logsumexp(torch.stack(scores), 0)
        torch.testing.assert_close(logp[i], want)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("op", [linear_logp, linear_lse])
def test_normalised_rows_are_those_of_pytorch(op, ids):
    """With a row of zeros, and one shorter than what rows are divided by at least."""
    given = problem(9, 8, 3, bias=ids, ids=ids)
    if op is linear_lse:
        given.pop("target")
    given["hidden"][2], given["weight"][5] = 0, given["weight"][5] * 1e-9
    leaves = leaves_of(given)
    unit = {name: F.normalize(given[name], dim=1, eps=1e-6) for name in ("hidden", "weight")}
    outs = []
    for out in (op(**given, l2_normalize=True), op(**(given | unit))):
        outs.append([out, out.new_zeros(9)] if op is linear_lse else list(out))
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cotangents = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    found = [
        torch.autograd.grad(
            [one for one in out if one.requires_grad], leaves, cotangents[: 2 - (op is linear_lse)]
        )
        for out in outs
    ]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_it_is_the_cross_entropy_of_pytorch():
    hidden, weight = torch.randn(300, 20, requires_grad=True), torch.randn(999, 20, requires_grad=True)
    target = torch.randint(999, (300,))
    target[4] = -100
    loss = F.cross_entropy(hidden @ weight.T, target, reduction="none")
    logp = linear_logp(hidden, weight, target).logp
    torch.testing.assert_close(-logp, loss)
    upstream = torch.randn(300)
    pairs = [torch.autograd.grad(out, (hidden, weight), upstream) for out in (-logp, loss)]
    for got, want in zip(*pairs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "candidates"), [(0, 6), (3, 0), (0, 0)])
def test_no_rows_and_no_candidates(rows, candidates):
    hidden = torch.randn(rows, 2, requires_grad=True)
    weight, bias = torch.randn(candidates, 2, requires_grad=True), torch.randn(candidates, requires_grad=True)
    temperature = torch.tensor(2.0, requires_grad=True)
    logp, lse = linear_logp(hidden, weight, torch.full((rows,), -100), bias=bias, temperature=temperature)
    assert logp.shape == lse.shape == (rows,)
    leaves = (hidden, weight, bias, temperature)
    found = torch.autograd.grad(logp.sum() + lse.sum(), leaves)
    for leaf, gradient in zip(leaves, found, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_backward_keeps_a_few_numbers_a_row(monkeypatch):
    monkeypatch.setitem(reference.BLOCK_SCORES, "cpu", 100)
    given = problem(50, 30, 4, dtype=torch.float32)
    inputs = {leaf.data_ptr() for leaf in leaves_of(given)}
    saved = []

    def pack(tensor):
        if tensor.data_ptr() not in inputs:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear_logp(**given)
    assert saved and max(saved) <= 50


def test_views_and_transposed_operands():
    weight = torch.randn(4, 30, dtype=torch.float64).t().requires_grad_()
    hidden = torch.randn(9, 8, dtype=torch.float64)[:, ::2].requires_grad_()
    given = {"hidden": hidden, "weight": weight, "target": torch.arange(27)[::3]}
    dense = {"hidden": hidden.contiguous(), "weight": weight.contiguous(), "target": given["target"].clone()}
    outs = [linear_logp(**one) for one in (given, dense)]
    for got, want in zip(*outs, strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(*(gradients(out, (hidden, weight)) for out in outs), strict=True):
        torch.testing.assert_close(got, want)


def test_autocast_does_not_reach_the_scores():
    given = problem(9, 8, 3, dtype=torch.float32)
    leaves = leaves_of(given)
    plain = linear_logp(**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_logp(**given)
        found = gradients(inside, leaves)
    for got, want in zip((*inside, *found), (*plain, *gradients(plain, leaves)), strict=True):
        assert torch.equal(got, want)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, hidden, weight, target):
        return linear_logp(hidden, weight, target, temperature=self.temperature, ignore_index=-1)


def test_a_compiled_graph():
    counts, head = CompileCounterWithBackend("aot_eager"), Head()
    compiled = torch.compile(head, backend=counts, fullgraph=True, dynamic=True)
    for rows in (50, 9, 33):
        hidden, weight = torch.randn(rows, 6, requires_grad=True), torch.randn(40, 6, requires_grad=True)
        target = torch.randint(40, (rows,))
        target[::4] = -1
        got, want = compiled(hidden, weight, target), head(hidden, weight, target)
        torch.testing.assert_close(got, want)
        leaves = (hidden, weight, head.temperature)
        for one, other in zip(gradients(got, leaves), gradients(want, leaves), strict=True):
            torch.testing.assert_close(one, other)
    assert counts.frame_count == 1


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
        "target of row 0 is -1, which is no row of weight: allowed are 0 to 8",
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
    ({"backend": "cuda"}, ValueError, "linear_logp has no backend 'cuda'; it has auto, .*reference"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_wrong_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        linear_logp(**arguments(**changes))


def test_explain_answers_for_it():
    assert dict(explain("linear_logp", **arguments()).rows)["reference"].ok


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    ("items", "width", "auto"), [(131_072, 128, True), (131_071, 128, False), (10**6, 16, False)]
)
def test_auto_leaves_small_catalogues_to_triton(items, width, auto, normalized, monkeypatch):
    """Below 2^24 entries of the weight; who names the backend gets it."""
    monkeypatch.setattr(hopper.triton_support, "missing_for_hopper", lambda: "")
    monkeypatch.setattr(hopper.triton_support, "support", lambda device, dtype: SUPPORTED)
    given = (torch.empty(7, width, device="meta"), torch.empty(items, width, device="meta"))
    target = torch.empty(7, dtype=torch.int64, device="meta")
    facts = logp_facts(*(one.bfloat16() for one in given), target, l2_normalize=normalized)
    support = hopper.supports(dataclasses.replace(facts, device="cuda"))
    assert (support.ok, support.auto) == (True, auto)
