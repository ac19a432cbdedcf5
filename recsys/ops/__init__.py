"""Pure functions on tensors: attention over jagged samples, row movement, and the layout that they share.

An op's package has its signature, its validator and one module per backend; `dispatch` chooses among these.
Nothing here knows about configs, models or tables.
"""

from recsys.ops.bucket_embedding import bucket_embedding
from recsys.ops.gated_norm import gated_norm
from recsys.ops.hstu_attention import hstu_attention
from recsys.ops.hstu_attention.cached import hstu_attention_cached
from recsys.ops.jagged import gather_rows
from recsys.ops.jagged.layout import PaddedIndex, Selection, SequenceLayout, offsets_from_lengths
from recsys.ops.jagged.mask import AttentionMask
from recsys.ops.linear_attention import LinearAttention, linear_attention
from recsys.ops.linear_logp import LinearLogp, linear_logp, linear_lse
from recsys.ops.norm_linear import norm_linear
from recsys.ops.relative_bias import CachedRelativeBias, RelativeBias
from recsys.ops.runtime.autograd import GradientBuffer
from recsys.ops.runtime.dispatch import explain, last_backend
from recsys.ops.segment_sum import segment_sum
from recsys.ops.softmax_attention import softmax_attention
from recsys.ops.softmax_attention.cached import softmax_attention_cached
from recsys.ops.softmax_attention.cross import cross_attention
from recsys.ops.top_k import TopK, top_k

__all__ = [
    "AttentionMask",
    "CachedRelativeBias",
    "GradientBuffer",
    "LinearAttention",
    "LinearLogp",
    "PaddedIndex",
    "RelativeBias",
    "Selection",
    "SequenceLayout",
    "TopK",
    "bucket_embedding",
    "cross_attention",
    "explain",
    "gather_rows",
    "hstu_attention",
    "hstu_attention_cached",
    "last_backend",
    "linear_attention",
    "linear_logp",
    "linear_lse",
    "norm_linear",
    "gated_norm",
    "offsets_from_lengths",
    "segment_sum",
    "softmax_attention",
    "softmax_attention_cached",
    "top_k",
]
