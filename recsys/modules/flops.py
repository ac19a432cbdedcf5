"""Floating point operations that a forward pass needs: what `flops` methods of mixers and models add up.

Counted are multiplications and additions of matrix products over real tokens and visible pairs, whatever a
kernel computes on top (padding, masked pairs, recomputation). Look-ups, sums of embeddings, norms and
activations count nothing.
"""

from torch import nn

from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.jagged.mask import count_pairs


def linear_flops(module: nn.Module, rows: int) -> int:
    """FLOP of all linear layers in `module`, each on `rows` rows: 2 x rows x weights."""
    return 2 * rows * sum(one.weight.numel() for one in module.modules() if isinstance(one, nn.Linear))


def attention_flops(mask: AttentionMask, layout: SequenceLayout, width: int, tail: int | None = None) -> int:
    """FLOP of one attention: <q, k> and p * v for every pair of tokens that see each other.

    Args:
        width: heads x (width of a key + width of a value).
        tail: of the history only the newest `tail` tokens look.
    """
    return 2 * count_pairs(mask, layout, tail) * width
