"""Cached attention inside traced graphs: one graph for all sizes of caches and of new tokens."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from recsys.ops import (
    AttentionMask,
    RelativeBias,
    SequenceLayout,
    hstu_attention_cached,
    offsets_from_lengths,
)
from tests.ops.harness import assert_serves, exported
from tests.tools.packaged import assert_packaged

CONTEXTUAL = 1


class Scorer(nn.Module):
    """A layer of a cached model; `longest_new` and `longest_cached` hold no numbers; sizes are bounds."""

    def __init__(self, backend="auto"):
        super().__init__()
        self.backend = backend
        self.position_table = nn.Parameter(torch.randn(2, 6))
        self.time_table = nn.Parameter(torch.randn(30))

    def forward(
        self,
        q,
        k,
        v,
        cache_k,
        cache_v,
        lengths,
        targets,
        cached,
        times,
        cache_times,
        longest_new,
        longest_cached,
    ):
        layout = SequenceLayout.trusted(
            lengths, offsets_from_lengths(lengths), targets, 0, q.shape[0], longest_new.shape[0], q.shape[0]
        )
        cache_layout = SequenceLayout.trusted(
            cached,
            offsets_from_lengths(cached),
            torch.zeros_like(cached),
            CONTEXTUAL,
            cache_k.shape[0],
            longest_cached.shape[0],
            0,
        )
        bias = RelativeBias(self.position_table, self.time_table, times, times + 100).with_cache(cache_times)
        mask = AttentionMask(window=3, prefix=1, target_group_size=2)
        cache = (cache_k, cache_v, cache_layout)
        return hstu_attention_cached(
            q, k, v, layout, *cache, mask, scale_len=16, bias=bias, backend=self.backend
        )


def inputs(shapes, spare=0):
    """A batch of (cached events, new events, targets); `spare`: by how much the bounds are too long."""
    events, new, targets = (torch.tensor(column, dtype=torch.int64) for column in zip(*shapes, strict=True))
    lengths, cached = new + targets, CONTEXTUAL + events
    total, kept = int(lengths.sum()), int(cached.sum())
    return (
        *(torch.randn(total, 2, width) for width in (4, 4, 5)),
        *(torch.randn(kept, 2, width) for width in (4, 5)),
        lengths,
        targets,
        cached,
        *(1_763_000_000 + torch.randint(0, 10**7, (size,)) for size in (total, kept)),
        *(torch.empty(int(part.max()) + spare) for part in (lengths, cached)),
    )


SIZES = [
    [(5, 2, 5), (3, 0, 4), (9, 1, 1)],  # no two sizes are alike: a compiler would take them for one
    [(0, 0, 0), (0, 3, 0), (7, 1, 2), (20, 5, 3)],
    [(4, 0, 9)],
    [(30, 0, 1)] * 5,
    [(3, 0, 0), (2, 0, 0)],  # nothing new
]
BATCHES = [inputs(shapes, spare) for spare, shapes in enumerate(SIZES)]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def test_an_exported_graph_serves_all_sizes():
    model = Scorer().eval()
    assert_serves(exported(model, BATCHES[0]).module(), model, BATCHES, **CLOSE)


@pytest.mark.slow
def test_a_package_serves_all_sizes_without_this_code(tmp_path):
    model = Scorer().eval()
    with torch.no_grad():
        assert_packaged(exported(model, BATCHES[0]), model, BATCHES, tmp_path)


def test_a_compiled_graph_is_traced_once():
    counter, model = CompileCounter(), Scorer()  # of traces; the export has all operations
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    assert_serves(
        compiled, model, [BATCHES[0], inputs([(6, 3, 1), (0, 2, 2), (9, 0, 4), (8, 2, 2)])], **CLOSE
    )
    assert counter.frame_count == 1
