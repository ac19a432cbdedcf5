"""Linear attention as a mixer, against sums over keys that are written out sample by sample."""

import pytest
import torch
from google.protobuf import text_format

from recsys import protos as pb
from recsys.modules.mixers import LinearMixer
from tests.modules.mixers.sequences import WIDTH, random_sequence
from tests.oracle import linear
from tests.oracle.layers import Weights
from tests.oracle.tokens import Token

SHAPES = [(5, 3), (0, 2), (7, 0), (0, 0), (1, 1)]
FORMS = {
    "retention": "form: RETENTION",
    "gated": "form: GATED",
    "delta": "form: DELTA",
    "no channels": "form: GATED time_channel: false position_channel: false feed_forward_dim: 0",
    "one head": "num_heads: 1 num_layers: 1 time_channel: false",
}


def build(form: str) -> tuple[LinearMixer, pb.LinearMixer]:
    config = pb.LinearMixer(num_heads=2, qk_dim=4, v_dim=3, feed_forward_dim=5)
    config.MergeFrom(text_format.Parse(form, pb.LinearMixer()))
    torch.manual_seed(0)
    mixer = LinearMixer(config, embedding_dim=WIDTH).double().eval()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return mixer, config


def tokens_of(sequence, values) -> list[list[Token]]:
    """The tokens of each sample."""
    layout, samples = sequence.layout, []
    names = ("contextual", "history", "target")
    columns = [layout.kinds().tolist(), sequence.timestamps.tolist(), sequence.next_timestamps.tolist()]
    offsets = layout.offsets.tolist()
    for start, end in zip(offsets[:-1], offsets[1:], strict=True):
        counts = [0, 0, 0]
        tokens = []
        for row in range(start, end):
            kind, time, next_time = (column[row] for column in columns)
            tokens.append(Token(names[kind], counts[kind], time, next_time, values[row]))
            counts[kind] += 1
        samples.append(tokens)
    return samples


@pytest.mark.parametrize(("form", "contextual"), [("gated", 0), *((form, 2) for form in FORMS)])
def test_outputs_and_gradients_are_those_of_the_oracle(form, contextual):
    mixer, config = build(FORMS[form])
    sequence = random_sequence(SHAPES, contextual=contextual)
    values = sequence.values.requires_grad_()
    parameters = dict(mixer.named_parameters())
    expected = [
        token.value
        for tokens in tokens_of(sequence, values)
        for token in linear.run(config, Weights(parameters), tokens)
    ]
    mixed, expected = mixer(sequence).values, torch.stack(expected)
    assert_near(mixed, expected, "values")
    cotangent = torch.randn_like(expected)
    leaves = {"values": values, **parameters}
    both = [torch.autograd.grad(actual, list(leaves.values()), cotangent) for actual in (mixed, expected)]
    for name, got, want in zip(leaves, *both, strict=True):
        assert_near(got, want, name)


def assert_near(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Equal but for first rates of forgetting, which a module holds in float32."""
    assert (got - want).norm() <= 1e-4 * want.norm(), name
