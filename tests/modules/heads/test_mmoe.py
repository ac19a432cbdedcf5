"""MMoE against its formula in plain loops, and what its gates do."""

import torch

from recsys import protos as pb
from recsys.modules.heads import MmoeHead
from tests.modules.heads import plain


def make(**fields) -> MmoeHead:
    torch.manual_seed(5)
    head = MmoeHead(pb.MmoeHead(**fields), embedding_dim=6, num_outputs=[1, 2, 1]).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return head


def by_hand(head: MmoeHead, user: list[float], item: list[float]) -> list[float]:
    x = [a * b for a, b in zip(user, item, strict=True)]
    experts = [plain.expert(module, x) for module in head.experts]
    results = []
    for gate, tower in zip(head.gates, head.towers, strict=True):
        weights = plain.softmax(plain.mlp(gate.scores, x))
        results += plain.mlp(tower, plain.mixture(weights, experts))
    return results


def test_formula():
    head = make(
        num_experts=3, expert_dim=5, expert={"hidden": [4]}, gate={"hidden": [3]}, tower={"hidden": [7]}
    )
    user, item = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    expected = [by_hand(head, *pair) for pair in zip(user.tolist(), item.tolist(), strict=True)]
    torch.testing.assert_close(head(user, item), torch.tensor(expected, dtype=torch.float64))


def test_numbers_of_the_config_and_their_defaults():
    head = make(num_experts=3, expert_dim=5, tower={"hidden": [7]})
    assert [len(part) for part in (head.experts, head.gates, head.towers)] == [3, 3, 3]
    assert [tower[0].in_features for tower in head.towers] == [5, 5, 5]
    assert [tower[-1].out_features for tower in head.towers] == [1, 2, 1]
    assert len(make().experts) == 4 and make().towers[0][0].in_features == 64


def test_weights_of_a_gate_add_up_to_one():
    head = make(num_experts=5, expert_dim=2)
    x, same = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    for gate in head.gates:
        torch.testing.assert_close(gate(x, [same] * 5), same)
        # One expert differs: its weight shows, and no weight is negative.
        shares = torch.stack(
            [gate(x, [torch.full_like(same, float(k == item)) for k in range(5)])[:, 0] for item in range(5)]
        )
        assert (shares > 0).all()
        torch.testing.assert_close(shares.sum(0), torch.ones(20, dtype=torch.float64))


def test_tasks_weigh_the_experts_each_in_its_own_way():
    head = make(num_experts=3, expert_dim=5)
    user, item = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    before = head(user, item)
    with torch.no_grad():
        head.gates[1].scores[-1].bias += torch.tensor([3.0, 0.0, 0.0])
    changed = (head(user, item) != before).any(0).tolist()
    assert changed == [False, True, True, False]
