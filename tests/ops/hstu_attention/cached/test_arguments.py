"""Wrong arguments of `hstu_attention_cached` are named."""

import pytest
import torch

from recsys.ops import CachedRelativeBias, RelativeBias, SequenceLayout, hstu_attention_cached
from tests.ops import harness
from tests.ops.cases import cut, qkv, times
from tests.ops.oracle import Sample


def arguments(**changes):
    batch = [Sample(1, 3, 2), Sample(1, 1, 0)]
    parts = cut(batch, [2, 1])
    names = ("q", "k", "v", "layout", "cache_k", "cache_v", "cache_layout")
    inputs = [tensor.detach().float() for tensor in qkv(8, dim=3, v_dim=4)]
    return dict(zip(names, parts.arguments(*inputs), strict=True)) | {"scale_len": 8} | changes


def bias_with(**changes):
    fields = {"position_table": torch.zeros(4), "time_table": torch.zeros(4)}
    fields |= dict(zip(("timestamps", "next_timestamps"), times(3), strict=True))
    return CachedRelativeBias(**(fields | {"cache_timestamps": times(5)[0]} | changes))


def layout(lengths, targets=None):
    return SequenceLayout(torch.tensor(lengths), None if targets is None else torch.tensor(targets))


KV = torch.zeros(5, 2, 3)
CONTINUES = "cache_layout has 1 samples, layout 2; each sample of layout continues"
V_SHAPE = r"cache_v must have shape \[cached tokens, 2, 4\] as v, got \(5, 2, 3\)"
PLAIN = RelativeBias(torch.zeros(4), torch.zeros(4), *times(3))
PLAIN_BIAS = "bias must be a CachedRelativeBias .see RelativeBias.with_cache. or None, got RelativeBias"
FEW_TIMES, MANY_TIMES = bias_with(cache_timestamps=times(3)[0]), bias_with(timestamps=times(5)[0])
THREE_HEADS = bias_with(time_table=torch.zeros(3, 4))
WRONG = [
    ({"q": torch.zeros(3, 6)}, ValueError, r"q must have shape \[total_len, heads, dim\], got \(3, 6\)"),
    ({"layout": layout([3, 2])}, ValueError, "q has 3 rows, the layout total_len = 5"),
    ({"cache_layout": [4]}, TypeError, "cache_layout must be a SequenceLayout, got list"),
    ({"cache_layout": layout([5])}, ValueError, CONTINUES),
    ({"cache_layout": layout([3, 2], [1, 1])}, ValueError, "cache_layout must hold no targets, it has 2"),
    ({"cache_layout": layout([3, 2]).to("meta")}, ValueError, "cache_layout is on meta, layout on cpu"),
    ({"cache_layout": layout([3, 3])}, ValueError, "cache_k has 5 rows, the cache_layout total_len = 6"),
    ({"cache_k": None}, TypeError, "cache_k must be a tensor, got NoneType"),
    ({"cache_k": KV.half()}, TypeError, "cache_k must have the dtype of q, torch.float32"),
    ({"cache_v": KV}, ValueError, V_SHAPE),
    ({"cache_v": torch.zeros(5, 2, 4, device="meta")}, ValueError, "cache_v is on meta, v on cpu"),
    ({"scale_len": -1}, ValueError, "scale_len must be positive and finite, got -1"),
    ({"alpha": float("nan")}, ValueError, "alpha must be finite, got nan"),
    ({"bias": PLAIN}, TypeError, PLAIN_BIAS),
    ({"bias": FEW_TIMES}, ValueError, "bias.cache_timestamps has 3 entries, cache_k has 5 rows"),
    ({"bias": MANY_TIMES}, ValueError, "bias.timestamps has 5 entries, q has 3 rows"),
    ({"bias": THREE_HEADS}, ValueError, "bias.time_table has 3 rows, q has 2 heads"),
]

test_wrong_arguments_are_named = harness.refused(hstu_attention_cached, arguments, WRONG)


def test_new_contextual_tokens_are_refused():
    given = arguments()
    given["layout"] = SequenceLayout.trusted(
        given["layout"].lengths, given["layout"].offsets, given["layout"].num_targets, 1, 3, 3, 2
    )
    with pytest.raises(ValueError, match="layout must hold no contextual tokens, they are in the cache"):
        hstu_attention_cached(**given)


@pytest.mark.parametrize("name", ["q", "v", "cache_k", "cache_v"])
def test_gradients_are_refused(name):
    given = arguments()
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="computes no gradients; call it under torch.no_grad"):
        hstu_attention_cached(**given)
    with torch.no_grad():
        hstu_attention_cached(**given)


def test_backends_are_asked_about_the_new_tokens():
    for targets, only in (([2, 1], True), ([1, 1], False)):
        facts = harness.facts_of(hstu_attention_cached, **arguments(layout=layout([2, 1], targets)))
        assert facts.only_targets is only
        assert facts.num_units == 2 * facts.num_heads  # a tile for each sample
