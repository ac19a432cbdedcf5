"""Layers that each row makes for itself, against a loop over rows that builds every matrix."""

import pytest
import torch
from torch.nn.functional import silu

from recsys import protos as pb
from recsys.modules.gated_mlp import ContextualizedMLP, RowContext
from recsys.ops import SequenceLayout

IN, CONTEXT, OUT = 5, 3, 4
FORMS = {
    "full": pb.ContextualizedMlp(context_dim=6),
    "rank": pb.ContextualizedMlp(context_dim=6, rank=2),
    "hidden": pb.ContextualizedMlp(context_dim=6, hidden=[7, 8]),
    "hidden and rank": pb.ContextualizedMlp(context_dim=6, hidden=[7], rank=3),
}
LENGTHS = [[2, 0, 3, 1], [4], [0, 0], [1, 1]]


@pytest.fixture(params=FORMS)
def module(request):
    built = ContextualizedMLP(FORMS[request.param], in_dim=IN, context_dim=CONTEXT, out_dim=OUT).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    return built


def rows_of(lengths):
    features = torch.randn(len(lengths), CONTEXT, dtype=torch.float64)
    return RowContext(features, SequenceLayout(torch.tensor(lengths)))


def row_by_row(module, x, rows):
    """[W_b, a_b] = G silu(LayerNorm(A c_b)); y = W_b z + a_b."""
    results = []
    compress, norm, _ = module.compress
    for features, items in zip(rows.features, x.split(rows.layout.lengths.tolist()), strict=True):
        hidden = compress.weight @ features + compress.bias
        centred = hidden - hidden.mean()
        hidden = silu(centred / (centred.square().mean() + 1e-6).sqrt() * norm.weight + norm.bias)
        generated = (module.generate.weight @ hidden + module.generate.bias).view(OUT, -1)
        for item in items:
            z = item
            for layer in module.shared:
                if not isinstance(layer, torch.nn.Linear):
                    z = silu(z)
                else:
                    z = layer.weight @ z + (0 if layer.bias is None else layer.bias)
            results.append(generated[:, :-1] @ z + generated[:, -1])
    return torch.stack(results) if results else x.new_zeros(0, OUT)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_a_loop_over_rows(module, lengths):
    rows, x = rows_of(lengths), torch.randn(sum(lengths), IN, dtype=torch.float64)
    torch.testing.assert_close(module(x, rows), row_by_row(module, x, rows))


def test_gradients_are_those_of_the_loop(module):
    rows = rows_of([2, 0, 3, 1])
    x = torch.randn(6, IN, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(6, OUT, dtype=torch.float64)
    inputs = [x, *module.parameters()]
    actual = torch.autograd.grad(module(x, rows), inputs, cotangent)
    expected = torch.autograd.grad(row_by_row(module, x, rows), inputs, cotangent)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)
        assert got.any()


def test_rows_without_a_difference_share_one_layer():
    module = ContextualizedMLP(FORMS["full"], in_dim=IN, context_dim=CONTEXT, out_dim=OUT)
    torch.nn.init.zeros_(module.generate.weight)
    shared = module.generate.bias.view(OUT, IN + 1)
    x = torch.randn(5, IN)
    rows = RowContext(torch.randn(2, CONTEXT), SequenceLayout(torch.tensor([3, 2])))
    torch.testing.assert_close(module(x, rows), x @ shared[:, :-1].T + shared[:, -1])


def test_starts_near_one_shared_layer():
    torch.manual_seed(0)
    module = ContextualizedMLP(pb.ContextualizedMlp(), in_dim=64, context_dim=10, out_dim=64)
    generated = module.generate(module.compress(torch.randn(50, 10)))
    deviation = (generated - module.generate.bias).std() / module.generate.bias.std()
    assert 0.05 < deviation < 0.2


def test_padding_may_be_longer_than_needed(module):
    rows, x = rows_of([2, 0, 3, 1]), torch.randn(6, IN, dtype=torch.float64)
    layout = rows.layout
    bounded = SequenceLayout.trusted(
        layout.lengths, layout.offsets, layout.num_targets, 0, total_len=6, max_len=11, total_targets=0
    )
    torch.testing.assert_close(module(x, RowContext(rows.features, bounded)), module(x, rows))


def test_flops_are_those_of_its_matrix_products(module):
    from torch.utils.flop_counter import FlopCounterMode

    # Rows of one length: nothing is padded.
    rows = rows_of([3, 3])
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(6, IN, dtype=torch.float64), rows)
    assert module.flops(6, 2) == counter.get_total_flops()


def test_needs_features():
    with pytest.raises(ValueError, match="no feature has the side USER"):
        ContextualizedMLP(pb.ContextualizedMlp(), in_dim=2, context_dim=0, out_dim=2)
