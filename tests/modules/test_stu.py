import gc
import itertools
from functools import partial

import pytest
import torch

from recsys.modules import stu_paths
from recsys.modules.relative_bias import RelativeBiasTables
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu import STUConfig, STULayer
from recsys.ops import AttentionMask, hstu_attention
from tests.modules.memory import Allocations
from tests.ops import oracle
from tests.ops.cases import layout_of, samples, times

EMBEDDING, HEADS, QK, V, SCALE = 5, 2, 3, 4, 7.0
FORMS = list(itertools.product(("u", "uvqk"), ("layer", "group"), ("ugn", "concat")))
PARTS = ("normed_x", "uvqk", "gated")
CHOICES = [choice for size in (1, 2, 3) for choice in itertools.combinations(PARTS, size)]


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


def random_layer(form, **settings):
    layer = STULayer(
        EMBEDDING, num_heads=HEADS, qk_dim=QK, v_dim=V, config=STUConfig(*form), **settings
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


@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_alone_are_those_of_the_formula(form):
    layer, x = random_layer(form), torch.randn(4, EMBEDDING, dtype=torch.float64)
    actual = layer.keys_and_values(x)
    joined = torch.stack(
        [
            layer.uvqk.weight @ normed(token, layer.input_norm.weight, layer.input_norm.bias)
            + layer.uvqk.bias
            for token in x
        ]
    )
    if form[0] == "uvqk":
        joined = silu(joined)
    first = 2 * HEADS * V + HEADS * QK  # behind u, v and q
    torch.testing.assert_close(actual.k, joined[:, first:].view(4, HEADS, QK))
    torch.testing.assert_close(actual.v, joined[:, HEADS * V : 2 * HEADS * V].view(4, HEADS, V))
    assert len(layer.keys_and_values(x[:0]).k) == 0


@pytest.mark.parametrize("gate", ["ugn", "concat"])
def test_only_the_research_form_has_an_output_bias(gate):
    layer = STULayer(EMBEDDING, num_heads=HEADS, qk_dim=QK, v_dim=V, config=STUConfig(gate=gate))
    assert (layer.output.bias is not None) == (gate == "ugn")


def test_dropout_acts_before_the_output_projection_in_training_only():
    layer = STULayer(EMBEDDING, num_heads=1, qk_dim=QK, v_dim=V, dropout=1 - 1e-7)
    x = torch.randn(3, EMBEDDING)
    # All of y dropped, all but surely: what is left is the residual.
    torch.testing.assert_close(layer(x, lambda q, k, v: v), x)
    assert not torch.equal(layer.eval()(x, lambda q, k, v: v), x)


def test_a_scale_acts_on_what_is_added():
    layer = random_layer(("u", "layer", "ugn"))
    x, scale = torch.randn(3, EMBEDDING).double(), torch.tensor([[0.0], [1.0], [2.5]])
    added = layer(x, lambda q, k, v: v) - x
    torch.testing.assert_close(layer(x, lambda q, k, v: v, scale), x + scale * added)


class Readers(torch.autograd.Function):
    """Stands for an attention kernel: it keeps q, k and v, and counts its calls."""

    forward_calls = 0

    @staticmethod
    def forward(ctx, q, k, v):
        Readers.forward_calls += 1
        ctx.save_for_backward(q, k, v)
        return v * q.sum(-1, keepdim=True) * k.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        sums = [part.sum(-1, keepdim=True) for part in (q, k)]
        scores = (grad * v).sum(-1, keepdim=True)
        return (scores * sums[1]).expand_as(q), (scores * sums[0]).expand_as(k), grad * sums[0] * sums[1]


def gradients(layer, x, attend, autocast=False):
    """Output and gradients of a training step that begins with the same random numbers each time."""
    torch.manual_seed(7)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = layer(x, attend)
    torch.manual_seed(8)  # backward must find the numbers of forward elsewhere
    cotangent = torch.randn_like(output)
    after_forward = torch.get_rng_state()
    actual = torch.autograd.grad(output, [x, *layer.parameters()], cotangent)
    assert torch.equal(torch.get_rng_state(), after_forward)
    return [output, *actual]


def assert_recompute_changes_nothing(layer, x, attend, choice, **settings):
    layer.recompute = frozenset()
    expected = gradients(layer, x, attend, **settings)
    layer.recompute = frozenset(choice)
    for got, want in zip(gradients(layer, x, attend, **settings), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
@pytest.mark.parametrize("form", FORMS)
def test_recompute_changes_no_bit_of_a_gradient(form, choice):
    layer, layout = random_layer(form, dropout=0.3), layout_of(samples(contextual=1))
    x = torch.randn(layout.total_len, EMBEDDING, dtype=torch.float64, requires_grad=True)
    attend = partial(hstu_attention, layout=layout, mask=AttentionMask(window=3), scale_len=SCALE)
    assert_recompute_changes_nothing(layer, x, attend, choice)
    assert_recompute_changes_nothing(
        layer.float(), x.detach().float().requires_grad_(), attend, choice, autocast=True
    )
    empty = torch.zeros(0, EMBEDDING, requires_grad=True)
    assert_recompute_changes_nothing(layer, empty, Readers.apply, choice)


@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
def test_attention_runs_once_and_the_projection_twice_at_most(choice):
    layer = random_layer(("u", "layer", "concat"), recompute=choice)
    calls = {"uvqk": 0, "output": 0}
    for name in calls:
        getattr(layer, name).register_forward_hook(
            lambda *_, name=name: calls.update({name: calls[name] + 1})
        )
    before = Readers.forward_calls
    x = torch.randn(6, EMBEDDING, dtype=torch.float64, requires_grad=True)
    gradients(layer, x, Readers.apply)
    assert Readers.forward_calls == before + 1
    # A product that only ends a recomputed part is not computed again.
    assert calls == {"uvqk": 2 if "uvqk" in choice else 1, "output": 1}


@pytest.mark.parametrize("choice", [(), *CHOICES], ids=" ".join)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_recomputed_is_not_kept(form, choice):
    activation, norm, gate = form
    layer, rows = random_layer(form, recompute=choice), 100
    x = torch.randn(rows, EMBEDDING, dtype=torch.float64, requires_grad=True)
    value, key = HEADS * V, HEADS * QK
    statistics = 2 if norm == "layer" else 2 * HEADS  # mean and deviation
    kept = EMBEDDING + value  # the output and attention's result, whatever the choice
    if "normed_x" not in choice:
        kept += EMBEDDING + 2
    if "uvqk" not in choice:
        joined = 2 * value + 2 * key
        kept += joined + (value if activation == "u" else joined)  # before and behind the activation
    if "gated" not in choice:
        normed = value if norm == "layer" else 2 * value  # GroupNorm: before and behind its affine part
        kept += statistics + normed + (3 * value if gate == "concat" else value)
    gc.disable()  # nothing may need it to go away
    try:
        layer(x, Readers.apply)  # what PyTorch caches at a first call
        with Allocations() as allocations:
            output = layer(x, Readers.apply)
        assert allocations.alive() == kept * rows * 8
        output.sum().backward()
        del output
        assert allocations.alive() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_compiled_graph_serves_layers_and_sizes(backend, monkeypatch):
    """Inductor compiles C++, which takes 20 s; how often a graph is captured does not depend on it."""
    torch._dynamo.reset()
    compiled_front = torch.compile(stu_paths._front, dynamic=True, backend=backend)
    monkeypatch.setattr(stu_paths, "_compiled_front", lambda: compiled_front)
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    for seed, rows in enumerate([50, 7, 1, 0, 33]):
        torch.manual_seed(seed)
        layer = random_layer(("u", "layer", "concat"))
        x = torch.randn(rows, EMBEDDING, dtype=torch.float64, requires_grad=True)
        results = []
        for layer.compiled in (True, False):
            results.append(gradients(layer, x, Readers.apply))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
    assert counters["unique_graphs"] == 1


def test_what_is_compiled_is_not_recomputed():
    with pytest.raises(ValueError, match="compile: compiled layers cannot recompute"):
        random_layer(("u", "layer", "concat"), recompute=["uvqk"], compiled=True)


def test_nothing_is_recomputed_without_gradients():
    layer = random_layer(("u", "layer", "concat"), recompute=PARTS)
    x = torch.randn(4, EMBEDDING, dtype=torch.float64)
    with torch.no_grad(), Allocations() as allocations:
        output = layer(x, Readers.apply)
    assert allocations.alive() == output.untyped_storage().nbytes()


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
    actual = hstu_attention(q, k, v, layout, mask, scale_len=SCALE, bias=bias)
    torch.testing.assert_close(actual, oracle.hstu(q, k, v, batch, mask, QK**-0.5, SCALE, bias))
    assert len(list(tables.parameters())) == (2 if buckets else 1)
