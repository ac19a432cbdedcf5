"""Counts floating-point operations of a forward pass, for the `flops` methods of mixers and models.

The count comprises the multiplications and additions of matrix products over real tokens and visible pairs.
It leaves out additional work of kernels (padding, masked pairs, recomputation), lookups, sums of embeddings,
norms and activations.
"""

from torch import nn

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.jagged.mask import count_pairs


def linear_flops(module: nn.Module, rows: int) -> int:
    """Returns the FLOP of all linear layers in `module` on `rows` rows each: 2 x rows x weights."""
    return 2 * rows * sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def attention_flops(mask: AttentionMask, layout: SequenceLayout, width: int, tail: int | None = None) -> int:
    """Returns the FLOP of one attention: <q, k> and p * v for every visible pair of tokens.

    Args:
        width: heads x (width of a key + width of a value).
        tail: number of newest history tokens that attend; None for all.
    """
    return 2 * count_pairs(mask, layout, tail) * width
