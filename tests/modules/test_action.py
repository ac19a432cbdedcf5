import pytest
import torch

from recsys import protos as pb
from recsys.modules.action import ActionEncoder
from recsys.modules.gated_mlp import RowContext
from recsys.ops import SequenceLayout


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


def concatenated(layers, **fields):
    config = pb.ActionEncoder(watch_time_thresholds=[5.0], concatenated=layers)
    config.bits.add(name="click", bit=0)
    config.bits.add(name="like", bit=3)
    return ActionEncoder(config, embedding_dim=3, **fields)


ACTIONS, SECONDS = torch.tensor([0b0000, 0b0001, 0b1001, 0b1000]), torch.tensor([0.0, 9.0, 5.0, 1.0])
PRESENT = [(0, 0, 0), (1, 0, 1), (1, 1, 1), (0, 1, 0)]  # click, like, watched for 5 s


def side_by_side(encode):
    return torch.stack(
        [torch.cat([on * vector for on, vector in zip(row, encode.weight, strict=True)]) for row in PRESENT]
    )


def test_vectors_side_by_side_go_through_layers():
    encode = concatenated(pb.ConcatenatedActions(dim=2, mlp=pb.Mlp(hidden=[5])))
    first, _, last = encode.project
    hidden = side_by_side(encode) @ first.weight.T + first.bias
    expected = torch.nn.functional.silu(hidden) @ last.weight.T + last.bias
    torch.testing.assert_close(encode(ACTIONS, SECONDS), expected)
    # A like with a click is more than one plus the other.
    nothing, click, both, like = encode(torch.tensor([0, 1, 9, 8]), torch.zeros(4))
    assert (both - click - like + nothing).abs().max() > 1e-4


def test_layers_of_the_user():
    layers = pb.ConcatenatedActions(dim=2, contextualized=pb.ContextualizedMlp(context_dim=4))
    encode = concatenated(layers, context_dim=6)
    rows = RowContext(torch.randn(2, 6), SequenceLayout(torch.tensor([1, 3])))
    expected = encode.project(side_by_side(encode), rows)
    torch.testing.assert_close(encode(ACTIONS, SECONDS, rows), expected)


def test_layers_need_something_to_concatenate():
    with pytest.raises(ValueError, match="neither a bit nor a threshold"):
        ActionEncoder(pb.ActionEncoder(concatenated=pb.ConcatenatedActions()), embedding_dim=3)
    with pytest.raises(ValueError, match="no feature has the side USER"):
        concatenated(pb.ConcatenatedActions(contextualized=pb.ContextualizedMlp()))
