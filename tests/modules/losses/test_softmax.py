"""Softmax loss, both forms, against exponentials summed in Python floats."""

import math

import pytest
import torch
from torch import Tensor

from recsys import protos as pb
from recsys.modules.losses.softmax import IGNORED, SoftmaxLoss
from recsys.ops.linear_logp import reference

TEMPERATURE = 0.3


def make(temperature: float = TEMPERATURE) -> SoftmaxLoss:
    return SoftmaxLoss(pb.SoftmaxLoss(temperature=temperature))


def by_hand(
    query: Tensor, positive: Tensor, negatives: list[Tensor], temperature: float = TEMPERATURE
) -> float:
    """log(sum of exp of all scores / exp of the positive's), one query, plain floats."""

    def score(item: Tensor) -> float:
        return sum(a * b for a, b in zip(query.tolist(), item.tolist(), strict=True)) / temperature

    total = math.exp(score(positive)) + sum(math.exp(score(item)) for item in negatives)
    return math.log(total) - score(positive)


def full_problem():
    torch.manual_seed(1)
    queries, items = torch.randn(6, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    return queries, items, torch.tensor([0, 8, 3, 3, IGNORED, 5])


def sampled_problem():
    """Drawn ids with a repetition, an accidental hit of queries 1 and 3, and twice the one of query 2."""
    torch.manual_seed(2)
    table = torch.randn(50, 4, dtype=torch.float64)
    item_ids = torch.tensor([7, 12, 12, 30, 41])
    targets = torch.tensor([9, 7, 12, 30, IGNORED])
    return torch.randn(5, 4, dtype=torch.float64), table, item_ids, targets


def test_full_is_the_sum_over_all_items():
    queries, items, targets = full_problem()
    expected = []
    for query, target in zip(queries, targets.tolist(), strict=True):
        others = [item for row, item in enumerate(items) if row != target]
        expected.append(0.0 if target == IGNORED else by_hand(query, items[target], others))
    torch.testing.assert_close(make()(queries, items, targets), torch.tensor(expected, dtype=torch.float64))


def test_shared_negatives_leave_out_the_target_and_count_the_positive_once():
    queries, table, item_ids, targets = sampled_problem()
    expected = []
    for query, target in zip(queries, targets.tolist(), strict=True):
        others = [table[i] for i in item_ids.tolist() if i != target]
        expected.append(0.0 if target == IGNORED else by_hand(query, table[target], others))
    actual = make()(
        queries, table[item_ids], targets, positives=table[targets.clamp(min=0)], item_ids=item_ids
    )
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_drawing_every_item_is_the_full_form():
    queries, items, targets = full_problem()
    ids = torch.randperm(9)
    sampled = make()(queries, items[ids], targets, positives=items[targets.clamp(min=0)], item_ids=ids)
    torch.testing.assert_close(sampled, make()(queries, items, targets))


def test_only_accidental_hits_leave_nothing_to_learn():
    query = torch.randn(1, 4, requires_grad=True)
    items = torch.randn(1, 4).expand(3, 4)
    loss = make()(query, items, torch.tensor([5]), positives=items[:1], item_ids=torch.tensor([5, 5, 5]))
    loss.sum().backward()
    assert loss.item() == 0 and torch.equal(query.grad, torch.zeros(1, 4))


def test_gradients_of_the_full_form():
    queries, items, targets = full_problem()
    assert torch.autograd.gradcheck(make(), (queries.requires_grad_(), items.requires_grad_(), targets))


def test_gradients_of_the_sampled_form():
    queries, table, item_ids, targets = sampled_problem()

    def loss(queries: Tensor, table: Tensor) -> Tensor:
        positives = table[targets.clamp(min=0)]
        return make()(queries, table[item_ids], targets, positives=positives, item_ids=item_ids)

    assert torch.autograd.gradcheck(loss, (queries.requires_grad_(), table.requires_grad_()))


def test_ignored_queries_move_nothing():
    queries, items, targets = full_problem()
    queries.requires_grad_()
    make()(queries, items, targets).backward(torch.randn(6, dtype=torch.float64))
    assert torch.equal(queries.grad[4], torch.zeros(4, dtype=torch.float64))
    assert (queries.grad[:4] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confident_targets_keep_their_gradient(dtype):
    """p above 0.999: p - 1 must not be a difference of rounded probabilities."""
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=dtype, requires_grad=True)
    items = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.0, 0.0]], dtype=dtype)
    # Scores 10 against two of 0: 1 - p = 2 / (exp(10) + 2) = 9.08e-5.
    loss = make(temperature=0.05)(queries, items, torch.tensor([0, 1]))
    loss.sum().backward()
    rest = 2 / (math.exp(10) + 2)
    torch.testing.assert_close(loss, torch.full((2,), -math.log1p(-rest)), rtol=1e-3, atol=0)
    # d loss / d query = sum over items of (p - [target]) item / temperature.
    wrong = rest / 2 * 0.5 / 0.05
    true = -rest * 0.5 / 0.05
    expected = torch.tensor([[true, wrong], [wrong, true]])
    torch.testing.assert_close(queries.grad.float(), expected, rtol=4e-3, atol=0)


def test_huge_scores_do_not_overflow():
    queries = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    loss = make()(queries, torch.tensor([[1.0], [-1.0]]), torch.tensor([0, 0]))
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([0.0, 2e4 / TEMPERATURE]))
    assert queries.grad.isfinite().all()


def test_autocast_does_not_reach_the_scores():
    queries, items, targets = (x.float() if x.is_floating_point() else x for x in full_problem())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = make()(queries, items, targets)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, make()(queries, items, targets))


@pytest.mark.parametrize("form", ["full", "sampled"])
def test_blocks_change_nothing_but_the_memory(monkeypatch, form):
    if form == "full":
        queries, items, targets = full_problem()
        leaves, more = (queries, items), {}
    else:
        queries, table, item_ids, targets = sampled_problem()
        items, positives = table[item_ids], table[targets.clamp(min=0)]
        leaves, more = (queries, items, positives), {"positives": positives, "item_ids": item_ids}
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.randn(len(queries), dtype=torch.float64)
    whole = make()(queries, items, targets, **more)
    expected = torch.autograd.grad(whole, leaves, upstream)

    monkeypatch.setitem(reference.BLOCK_SCORES, "cpu", 2 * len(items))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        blocks = make()(queries, items, targets, **more)
    torch.testing.assert_close(blocks, whole)
    for grad, wanted in zip(torch.autograd.grad(blocks, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(grad, wanted)
    assert max(saved) <= max(leaf.numel() for leaf in leaves)


def test_a_query_does_not_know_the_others():
    queries, items, targets = full_problem()
    alone = torch.cat([make()(queries[i : i + 1], items, targets[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(make()(queries, items, targets), alone)


def test_no_queries():
    queries, items = torch.empty(0, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    loss = make()(queries, items, torch.empty(0, dtype=torch.int64))
    loss.sum().backward()
    assert loss.shape == (0,) and torch.equal(items.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("target", [-2, 9])
def test_a_target_outside_names_its_row(target):
    queries, items, targets = full_problem()
    targets[3] = target
    with pytest.raises(
        ValueError, match=f"target of row 3 is {target}, which is not a row of weight: allowed are 0 to 8"
    ):
        make()(queries, items, targets)


def test_half_a_sampled_call_is_refused():
    queries, items, targets = full_problem()
    with pytest.raises(ValueError, match="positives and item_ids belong together"):
        make()(queries, items, targets, positives=queries)


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature: 0.0 is given"):
        make(temperature=0)


@pytest.mark.parametrize("sampled", [False, True])
def test_normalised_vectors_are_compared_as_of_unit_length(sampled):
    if sampled:
        queries, table, item_ids, targets = sampled_problem()
        given = [queries, table[item_ids], table[targets.clamp(min=0)]]
    else:
        queries, items, targets = full_problem()
        given = [queries, items]
    unit = [rows / rows.norm(dim=1, keepdim=True) for rows in given]
    losses = []
    for rows, options in ((given, {"l2_normalize": True}), (unit, {})):
        if sampled:
            options |= {"positives": rows[2], "item_ids": item_ids}
        losses.append(make()(rows[0], rows[1], targets, **options))
    torch.testing.assert_close(*losses)
    assert losses[0].any()


def learned(temperature: float) -> SoftmaxLoss:
    return SoftmaxLoss(pb.SoftmaxLoss(temperature=temperature, learn_temperature=True)).double()


@pytest.mark.parametrize("temperature", [0.3, 0.012, 0.004])
def test_a_learned_temperature_begins_where_it_is_told_and_stays_above_its_limit(temperature):
    loss = learned(temperature)
    assert loss.temperature.item() == pytest.approx(temperature, rel=1e-6)
    with torch.no_grad():
        loss.log_excess.fill_(-1000)
    assert loss.temperature.item() == min(0.01, temperature / 2)
    queries, items, targets = full_problem()
    assert loss(queries, items, targets).isfinite().all()
    assert "learned" in repr(loss) and "learned" not in repr(make())
    assert list(make().parameters()) == []


@pytest.mark.parametrize("l2_normalize", [False, True])
@pytest.mark.parametrize("form", ["full", "sampled", "weighed"])
def test_the_gradient_of_a_learned_temperature(form, l2_normalize):
    """Against differences of the loss of two fixed temperatures."""
    kinds = {"l2_normalize": l2_normalize}
    if form == "full":
        given = full_problem()
    else:
        queries, table, item_ids, targets = sampled_problem()
        given = (queries, table[item_ids], targets)
        kinds |= {"positives": table[targets.clamp(min=0)], "item_ids": item_ids}
        if form == "weighed":
            kinds["log_weights"] = torch.tensor([0.3, -1.0, 2.0, 0.0, -0.4], dtype=torch.float64)
    cotangent = torch.randn(len(given[2]), dtype=torch.float64)
    loss = learned(TEMPERATURE)
    actual = loss(*given, **kinds)
    at = loss.temperature.item()
    (gradient,) = torch.autograd.grad(actual, loss.log_excess, cotangent)
    step = 1e-5
    around = [(make(at + sign * step)(*given, **kinds) * cotangent).sum().item() for sign in (1, -1)]
    # temperature = limit + exp(log_excess)
    wanted = (around[0] - around[1]) / (2 * step) * (at - 0.01)
    assert gradient.item() == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(actual, make(at)(*given, **kinds))
