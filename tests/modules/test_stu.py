import itertools
from functools import partial

import pytest
import torch

from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu import RelativeBiasTables, STULayer
from recsys.ops import AttentionMask, hstu_attention
from tests.ops import oracle
from tests.ops.cases import layout_of, samples, times

EMBEDDING, HEADS, QK, V, SCALE = 5, 2, 3, 4, 7.0
FORMS = list(itertools.product(("u", "uvqk"), ("layer", "group"), ("ugn", "concat")))


def normed(x, weight, bias):
    """Layer norm of one vector."""
    mean = sum(x) / len(x)
    variance = sum((x - mean) ** 2) / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-6) * weight + bias


def silu(x):
    return x / (1 + torch.exp(-x))


def layer_by_tokens(layer, x, batch, mask, form):
    """The layer from its formula, a token at a time; attention from the oracle's loops."""
    activation, norm, gate = form
    parts = []
    for token in x:
        joined = (
            layer.uvqk.weight @ normed(token, layer.input_norm.weight, layer.input_norm.bias)
            + layer.uvqk.bias
        )
        ends = [0, HEADS * V, 2 * HEADS * V, 2 * HEADS * V + HEADS * QK, 2 * HEADS * V + 2 * HEADS * QK]
        u, v, q, k = (joined[start:end] for start, end in itertools.pairwise(ends))
        parts.append([silu(u), *(part if activation == "u" else silu(part) for part in (v, q, k))])
    u, v, q, k = (torch.stack(part) for part in zip(*parts, strict=True))
    q, k, v = (part.view(len(x), HEADS, -1) for part in (q, k, v))
    attended = oracle.hstu(q, k, v, batch, mask, alpha=QK**-0.5, scale_len=SCALE)
    outputs = []
    for token, gating, heads in zip(x, u, attended, strict=True):
        flat = heads.reshape(-1)
        if norm == "layer":
            scaled = normed(flat, layer.norm.weight, layer.norm.bias)
        else:
            scaled = torch.cat([normed(head, 1, 0) for head in heads]) * layer.norm.weight + layer.norm.bias
        y = gating * scaled if gate == "ugn" else torch.cat([gating, flat, gating * scaled])
        out = token + layer.output.weight @ y
        outputs.append(out + layer.output.bias if gate == "ugn" else out)
    return torch.stack(outputs)


def random_layer(form):
    activation, norm, gate = form
    layer = STULayer(
        EMBEDDING, num_heads=HEADS, qk_dim=QK, v_dim=V, activation=activation, norm=norm, gate=gate
    ).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("form", FORMS)
def test_equals_the_formula_token_by_token(form):
    layer, batch = random_layer(form), samples(contextual=1)
    layout, mask = layout_of(batch), AttentionMask(window=3, prefix=1)
    x = torch.randn(layout.total_len, EMBEDDING, dtype=torch.float64)
    attend = partial(hstu_attention, layout=layout, mask=mask, scale_len=SCALE)
    expected = layer_by_tokens(layer, x, batch, mask, form)
    torch.testing.assert_close(layer(x, attend), expected)


@pytest.mark.parametrize("gate", ["ugn", "concat"])
def test_only_the_research_form_has_an_output_bias(gate):
    layer = STULayer(EMBEDDING, num_heads=HEADS, qk_dim=QK, v_dim=V, gate=gate)
    assert (layer.output.bias is not None) == (gate == "ugn")


def test_dropout_acts_before_the_output_projection_in_training_only():
    layer = STULayer(EMBEDDING, num_heads=1, qk_dim=QK, v_dim=V, dropout=1.0)
    x = torch.randn(3, EMBEDDING)
    # All of y dropped: what is left is the residual.
    torch.testing.assert_close(layer(x, lambda q, k, v: v), x)
    assert not torch.equal(layer.eval()(x, lambda q, k, v: v), x)


@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize("buckets", [0, 9])
def test_bias_tables_reach_the_scores(heads, buckets):
    batch = samples(contextual=1)
    layout, mask = layout_of(batch), AttentionMask()
    tables = RelativeBiasTables(4, buckets, heads).double()
    for parameter in tables.parameters():
        torch.nn.init.normal_(parameter)
    total = layout.total_len
    bias = tables(JaggedSequence(torch.empty(total, 1), layout, *times(total)))
    q, k, v = (torch.randn(total, HEADS, QK, dtype=torch.float64) for _ in range(3))
    # Without time the bias is that of the positions alone.
    in_time = buckets or 1
    expected_time = tables.time if buckets else torch.zeros(*([] if heads is None else [heads]), 1).double()
    assert bias.time_table.shape[-1] == in_time
    torch.testing.assert_close(bias.time_table, expected_time)
    found = hstu_attention(q, k, v, layout, mask, scale_len=SCALE, bias=bias)
    torch.testing.assert_close(found, oracle.hstu(q, k, v, batch, mask, QK**-0.5, SCALE, bias))
    assert len(list(tables.parameters())) == (2 if buckets else 1)
