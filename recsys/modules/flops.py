"""Counts floating-point operations of a forward pass, for the `flops` methods of mixers and models.

The count comprises the multiplications and additions of matrix products over real tokens and visible pairs.
It leaves out additional work of kernels (padding, masked pairs, recomputation), lookups, sums of embeddings,
norms and activations.
"""

from weakref import WeakKeyDictionary

from torch import nn

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.jagged.mask import count_pairs

_LINEAR_WEIGHTS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Numbers of weights that have been counted before: every training step asks for them, and walking over a
model takes longer than all its other counts."""


def linear_flops(module: nn.Module, rows: int) -> int:
    """Returns the FLOP of all linear layers in `module` on `rows` rows each: 2 x rows x weights.

    The layers of a module must not change after the first call.
    """
    weights = _LINEAR_WEIGHTS.get(module)
    if weights is None:
        layers = (layer for layer in module.modules() if isinstance(layer, nn.Linear))
        weights = _LINEAR_WEIGHTS[module] = sum(layer.weight.numel() for layer in layers)
    return 2 * rows * weights


def attention_flops(mask: AttentionMask, layout: SequenceLayout, width: int, tail: int | None = None) -> int:
    """Returns the FLOP of one attention: <q, k> and p * v for every visible pair of tokens.

    Args:
        width: heads x (width of a key + width of a value).
        tail: number of newest history tokens that attend; None for all.
    """
    pairs = layout.memo(("pairs", mask, tail), lambda: count_pairs(mask, layout, tail))
    return 2 * pairs * width
