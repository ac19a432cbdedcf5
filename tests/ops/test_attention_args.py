"""What attention makes of its arguments: the default factor of scores, also where a compiler looks on."""

import pytest
import torch

from recsys.ops import SequenceLayout, hstu_attention, softmax_attention
from recsys.ops.attention_args import scale_of

CALLS = {
    "hstu": lambda *given: hstu_attention(*given, scale_len=9, backend="reference"),
    "softmax": lambda *given: softmax_attention(*given, backend="reference"),
}


class Attention(torch.nn.Module):
    """What a compiler sees: lengths are inputs."""

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
