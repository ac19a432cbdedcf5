import pytest
import torch

from recsys import protos as pb
from recsys.modules.action import ActionEncoder


def encoder(bits, thresholds):
    config = pb.ActionEncoder(watch_time_thresholds=thresholds)
    for bit in bits:
        config.bits.add(name=f"bit {bit}", bit=bit)
    return ActionEncoder(config, embedding_dim=3)


def test_each_bit_and_each_reached_threshold_adds_its_vector():
    encode = encoder(bits=[0, 2, 40], thresholds=[3.0, 10.0])
    zero, two, forty, three, ten = encode.weight.detach()
    nothing = torch.zeros(3)
    cases = [
        (0, 0.0, nothing),
        (0b101, 0.0, zero + two),
        (0b010, 2.9, nothing),  # a bit that is not in use
        (1 << 40, 3.0, forty + three),  # reached at the threshold itself
        ((1 << 40) | 0b111, 1e6, zero + two + forty + three + ten),
        (-1, float("inf"), zero + two + forty + three + ten),  # all 64 bits
    ]
    actions = torch.tensor([case[0] for case in cases])
    watch_time = torch.tensor([case[1] for case in cases])
    torch.testing.assert_close(encode(actions, watch_time).detach(), torch.stack([case[2] for case in cases]))


@pytest.mark.parametrize(("bits", "thresholds"), [([], []), ([1], []), ([], [5.0])])
def test_parts_may_be_left_out(bits, thresholds):
    encode = encoder(bits, thresholds)
    expected = encode.weight.detach().sum(0) if bits or thresholds else torch.zeros(3)
    torch.testing.assert_close(encode(torch.tensor([2]), torch.tensor([9.0]))[0].detach(), expected)


def test_no_events():
    assert encoder([0], [1.0])(torch.zeros(0, dtype=torch.int64), torch.zeros(0)).shape == (0, 3)
