"""`softmax_attention_cached` against loops over the queries and keys of whole samples."""

import pytest
import torch

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.softmax_attention.cached import softmax_attention_cached
from tests.ops.cases import MASKS, qkv
from tests.ops.softmax_attention.test_softmax_attention import by_loops

CACHED, NEW, TARGETS = (
    torch.tensor(counts) for counts in ([3, 0, 6, 0, 1], [2, 0, 0, 1, 4], [3, 0, 4, 2, 0])
)


@pytest.mark.parametrize("contextual", [0, 2])
@pytest.mark.parametrize("mask", MASKS[::2], ids=str)
@torch.no_grad()
def test_new_rows_are_those_of_whole_samples(mask, contextual):
    cache_layout = SequenceLayout(CACHED + contextual, None, contextual)
    layout = SequenceLayout(NEW + TARGETS, TARGETS)
    whole = SequenceLayout(CACHED + contextual + NEW + TARGETS, TARGETS, contextual)
    q, k, v = qkv(whole.total_len, v_dim=4)
    expected = by_loops(q, k, v, layout=whole, mask=mask)
    is_cached = whole.positions() < cache_layout.lengths[whole.sample_ids()]
    actual = softmax_attention_cached(
        q[~is_cached], k[~is_cached], v[~is_cached], layout, k[is_cached], v[is_cached], cache_layout, mask
    )
    torch.testing.assert_close(actual, expected[~is_cached], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_what_does_not_fit_is_named():
    layout, cache_layout = SequenceLayout(torch.tensor([2])), SequenceLayout(torch.tensor([3]))
    new, old, two = qkv(2, v_dim=3), qkv(3, v_dim=3)[1:], SequenceLayout(torch.tensor([1, 2]))
    given = {"layout": layout, "cache_k": old[0], "cache_v": old[1], "cache_layout": cache_layout}
    contextual = SequenceLayout(torch.tensor([2]), None, 1)
    wrong_type = "cache_v must have the dtype of v, torch.float64, got torch.float32"
    for changes, error, message in (
        ({"cache_layout": two}, ValueError, "cache_layout has 2 samples"),
        ({"layout": contextual}, ValueError, "layout must hold no contextual tokens, .* num_contextual is 1"),
        ({"cache_k": new[1]}, ValueError, "cache_k has 2 rows, the cache_layout total_len = 3"),
        ({"cache_v": old[1].float()}, TypeError, wrong_type),
    ):
        with pytest.raises(error, match=message):
            softmax_attention_cached(*new, **(given | changes), mask=AttentionMask())
