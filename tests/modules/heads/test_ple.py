"""PLE against its levels in plain loops, and who reads which expert."""

import pytest
import torch

from recsys import protos as pb
from recsys.modules.heads import PleHead
from tests.modules.heads import plain

OUTPUTS = (1, 2)


def make(**fields) -> PleHead:
    torch.manual_seed(6)
    head = PleHead(pb.PleHead(**fields), embedding_dim=6, num_outputs=OUTPUTS).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return head


def by_hand(head: PleHead, user: list[float], item: list[float]) -> list[float]:
    x = [a * b for a, b in zip(user, item, strict=True)]
    tasks, shared = [x for _ in OUTPUTS], x
    for number, level in enumerate(head.levels):
        experts = [[plain.expert(e, stream) for e in level.own[t]] for t, stream in enumerate(tasks)]
        common = [plain.expert(e, shared) for e in level.shared]
        mixed = []
        for t, stream in enumerate(tasks):
            weights = plain.softmax(plain.mlp(level.gates[t].scores, stream))
            mixed.append(plain.mixture(weights, experts[t] + common))
        if number < len(head.levels) - 1:
            weights = plain.softmax(plain.mlp(level.shared_gate.scores, shared))
            shared = plain.mixture(weights, sum(experts, []) + common)
        tasks = mixed
    return sum((plain.mlp(tower, stream) for tower, stream in zip(head.towers, tasks, strict=True)), [])


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_formula(levels):
    head = make(
        num_levels=levels,
        num_shared_experts=3,
        num_task_experts=2,
        expert_dim=5,
        expert={"hidden": [4]},
        gate={"hidden": [3]},
        tower={"hidden": [7]},
    )
    user, item = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    expected = [by_hand(head, *pair) for pair in zip(user.tolist(), item.tolist(), strict=True)]
    torch.testing.assert_close(head(user, item), torch.tensor(expected, dtype=torch.float64))


def test_numbers_of_the_config():
    head = make(num_levels=2, num_shared_experts=3, num_task_experts=1, expert_dim=5)
    first, last = head.levels
    for level, width in ((first, 6), (last, 5)):
        assert [len(experts) for experts in level.own] == [1, 1]
        assert [e[0][0].in_features for e in level.shared] == [width] * 3
        assert [gate.scores[-1].out_features for gate in level.gates] == [1 + 3] * 2
    assert first.shared_gate.scores[-1].out_features == 2 * 1 + 3
    assert last.shared_gate is None


def reached(head: PleHead, task: int) -> set[str]:
    """Experts that the loss of one task trains, as level/owner."""
    user, item = torch.randn(9, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    head.zero_grad()
    head(user, item).split(OUTPUTS, 1)[task].square().sum().backward()
    results = set()
    for number, level in enumerate(head.levels):
        for owner, experts in [("shared", level.shared), *enumerate(level.own)]:
            grads = [expert[0][0].weight.grad for expert in experts]
            reached = [grad is not None and bool(grad.any()) for grad in grads]
            assert len(set(reached)) == 1, "all of them or none"
            results |= {f"{number}/{owner}"} if reached[0] else set()
    return results


def test_a_task_trains_its_own_experts_and_the_shared_ones():
    assert reached(make(), 0) == {"0/0", "0/shared"}
    assert reached(make(), 1) == {"0/1", "0/shared"}


def test_behind_a_level_the_shared_stream_holds_every_task():
    assert reached(make(num_levels=2), 0) == {"0/0", "0/1", "0/shared", "1/0", "1/shared"}
