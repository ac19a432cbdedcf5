"""Arguments of attention: errors, and the default factor of scores, also in compiled code."""

import pytest
import torch

from recsys.ops import RelativeBias, SequenceLayout, hstu_attention, softmax_attention
from recsys.ops.attention_args import scale_of
from tests.ops import harness
from tests.ops.cases import times

CALLS = {
    "hstu": lambda *given: hstu_attention(*given, scale_len=9, backend="reference"),
    "softmax": lambda *given: softmax_attention(*given, backend="reference"),
}


class Attention(torch.nn.Module):
    """Attention as a compiler sees it: lengths are inputs."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, q, k, v, lengths, offsets, num_targets):
        layout = SequenceLayout.trusted(lengths, offsets, num_targets, 0, q.shape[0], q.shape[0], q.shape[0])
        return CALLS[self.name](q, k, v, layout)


def test_the_default_factor():
    assert scale_of(torch.zeros(3, 2, 64)) == 0.125


@pytest.mark.parametrize("name", CALLS)
def test_no_graph_computes_the_factor_of_a_symbolic_width(name):
    """PyTorch would take compiled code with the factor of another width from its cache on disk."""
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    made = torch.compile(Attention(name), dynamic=True, fullgraph=True, backend=note)
    layout = SequenceLayout(torch.tensor([5, 3]))
    for dim in (64, 256):
        q, k, v = torch.randn(3, 8, 2, dim, generator=torch.Generator().manual_seed(dim))
        want = CALLS[name](q, k, v, layout)
        torch.testing.assert_close(made(q, k, v, layout.lengths, layout.offsets, layout.num_targets), want)
    assert len(graphs) == 2  # one for each width
    for graph in graphs:
        computed = [node.meta.get("example_value") for node in graph.graph.nodes]
        assert not any(isinstance(value, torch.SymFloat) for value in computed)


def arguments(**changes):
    given = {"q": torch.zeros(5, 2, 3), "k": torch.zeros(5, 2, 3), "v": torch.zeros(5, 2, 4)}
    return given | {"layout": SequenceLayout(torch.tensor([3, 2])), "scale_len": 8} | changes


def bias_with(**changes):
    fields = {"position_table": torch.zeros(4), "time_table": torch.zeros(4)}
    fields |= dict(zip(("timestamps", "next_timestamps"), times(5), strict=True))
    return RelativeBias(**(fields | changes))


THREE_HEADS, FEW_TIMES = bias_with(time_table=torch.zeros(3, 4)), bias_with(timestamps=times(4)[0])
ELSEWHERE = bias_with(position_table=torch.zeros(4, device="meta"))
WRONG = [
    ({"q": torch.zeros(5, 6)}, ValueError, r"q must have shape \[total_len, heads, dim\], got \(5, 6\)"),
    ({"q": torch.zeros(5, 2, 3).long()}, TypeError, "q must be a floating point tensor, got a tensor"),
    ({"q": [1.0]}, TypeError, "q must be a floating point tensor, got list"),
    ({"k": torch.zeros(5, 2, 3).double()}, TypeError, "k must have the dtype of q, torch.float32"),
    ({"k": torch.zeros(4, 2, 3)}, ValueError, "k has 4 rows, the layout total_len = 5"),
    ({"k": torch.zeros(5, 2, 4)}, ValueError, "k must have the head dimension of q, 3, got 4"),
    ({"v": torch.zeros(5, 1, 4)}, ValueError, "v must have the heads of q, 2, got 1"),
    ({"v": torch.zeros(5, 2, 0)}, ValueError, "v must have at least one head and one dimension"),
    ({"v": torch.zeros(5, 2, 4, device="meta")}, ValueError, "v is on meta, the layout on cpu"),
    ({"layout": torch.tensor([3, 2])}, TypeError, "layout must be a SequenceLayout, got Tensor"),
    ({"mask": None}, TypeError, "mask must be an AttentionMask, got NoneType"),
    ({"scale_len": 0}, ValueError, "scale_len must be positive and finite, got 0"),
    ({"scale_len": torch.tensor(3)}, TypeError, "scale_len must be a number, got Tensor"),
    ({"alpha": float("nan")}, ValueError, "alpha must be finite, got nan"),
    ({"alpha": "auto"}, TypeError, "alpha must be a number, got str"),
    ({"bias": torch.zeros(5, 5)}, TypeError, "bias must be a RelativeBias or None, got Tensor"),
    ({"bias": THREE_HEADS}, ValueError, "bias.time_table has 3 rows, q has 2 heads"),
    ({"bias": FEW_TIMES}, ValueError, "bias.timestamps has 4 entries, q has 5 rows"),
    ({"bias": ELSEWHERE}, ValueError, "bias.position_table is on meta, q on cpu"),
]


test_wrong_arguments_are_named = harness.refused(hstu_attention, arguments, WRONG)


def test_the_scale_is_required():
    given = arguments()
    del given["scale_len"]
    with pytest.raises(TypeError, match="scale_len"):
        hstu_attention(**given)
