import pytest
import torch
from torch import nn

from recsys import protos as pb
from recsys.modules.mixers import SasRecMixer
from recsys.ops.jagged.mask import dense_mask
from tests.modules.mixers.sequences import WIDTH, random_sequence

SHAPES = [(5, 3), (0, 2), (6, 0)]


def torch_layer(block, heads):
    """PyTorch's own pre-norm encoder layer with the weights of a block."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, heads, dim_feedforward=7, dropout=0.0, layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).double()
    pairs = [
        (layer.self_attn.out_proj, block.project),
        (layer.linear1, block.widen),
        (layer.linear2, block.narrow),
        (layer.norm1, block.attention_norm),
        (layer.norm2, block.feed_forward_norm),
    ]
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(block.qkv.weight)
        layer.self_attn.in_proj_bias.copy_(block.qkv.bias)
        for mine, theirs in pairs:
            mine.weight.copy_(theirs.weight)
            mine.bias.copy_(theirs.bias)
    return layer


@pytest.mark.parametrize("heads", [1, 3])
def test_equals_pytorchs_transformer_on_padded_samples(heads):
    config = pb.SasRecMixer(num_layers=2, num_heads=heads, feed_forward_dim=7, mask={"window": 3})
    mixer = SasRecMixer(config, embedding_dim=WIDTH).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    sequence = random_sequence(SHAPES)
    actual = mixer(sequence).values.split(sequence.layout.lengths.tolist())
    visible = dense_mask(mixer.rules[0].mask, sequence.layout)
    parts = sequence.values.split(sequence.layout.lengths.tolist())
    for x, sees, mixed in zip(parts, visible, actual, strict=True):
        hidden = ~sees[: len(x), : len(x)]
        for block in mixer.blocks:
            x = torch_layer(block, heads)(x[None], src_mask=hidden)[0]
        expected = nn.functional.layer_norm(x, (WIDTH,), mixer.norm.weight, mixer.norm.bias, eps=1e-6)
        torch.testing.assert_close(mixed, expected)


def test_ligr_blocks_are_the_formula_a_token_at_a_time():
    """Tokens of a sample one by one, with PyTorch's own attention for the last of the tokens so far."""
    config = pb.SasRecMixer(num_layers=2, num_heads=3, feed_forward_dim=7, ligr=True)
    mixer = SasRecMixer(config, embedding_dim=WIDTH).double()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    sequence = random_sequence([(5, 0), (1, 0), (6, 0)], contextual=0)
    parts = [x.split(sequence.layout.lengths.tolist()) for x in (sequence.values, mixer(sequence).values)]
    for x, mixed in zip(*parts, strict=True):
        for block in mixer.blocks:
            x = torch.stack([ligr(block, x[: end + 1]) for end in range(len(x))])
        expected = nn.functional.layer_norm(x, (WIDTH,), mixer.norm.weight, mixer.norm.bias, eps=1e-6)
        torch.testing.assert_close(mixed, expected)


def ligr(block, seen):
    """The last token's output of a LiGR block, from the tokens that it sees, [n, E]."""

    def linear(layer, x):
        return layer.weight @ x + layer.bias

    def normalized(norm, x):
        return (x - x.mean()) / (x.var(correction=0) + 1e-6).sqrt() * norm.weight + norm.bias

    x = seen[-1]
    q, k, v = block.qkv(torch.stack([normalized(block.attention_norm, token) for token in seen])).chunk(3, 1)
    attention = nn.functional.multi_head_attention_forward  # its projections are the identity here
    unit, nothing = torch.eye(WIDTH, dtype=x.dtype), torch.zeros(3 * WIDTH, dtype=x.dtype)
    mixed, _ = attention(
        *(q[-1:], k, v, WIDTH, block.num_heads, unit.repeat(3, 1), nothing, None, None, False, 0.0),
        *(block.project.weight, block.project.bias),
    )
    x = x + torch.sigmoid(linear(block.attention_gate, x)) * mixed[0]
    part = block.feed_forward
    gate, values = linear(part.widen, normalized(part.norm, x)).chunk(2)
    added = linear(part.narrow, gate * torch.sigmoid(gate) * values)
    return x + torch.sigmoid(linear(block.feed_forward_gate, x)) * added


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"num_heads = 4 must divide model.embedding_dim = 6"):
        SasRecMixer(pb.SasRecMixer(num_heads=4), embedding_dim=WIDTH)
