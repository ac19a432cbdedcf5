"""Layer norms with float32 statistics for tokens of any dtype.

Both norms compute in the wider of the input's and the parameters' dtype and return the input's dtype:
bfloat16 tokens are normalized in float32 on every device, with or without autocast.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """Computes (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.

    Args:
        dim: size of the last dimension.
        eps: added to the (biased) variance.
    """

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., dim] to [..., dim] of the same dtype."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.layer_norm(wide, self.normalized_shape, self.weight, self.bias, self.eps).to(x.dtype)


class HeadNorm(nn.Module):
    """Group norm of attention outputs: normalizes each head of a token alone, then scales and shifts.

    Args:
        num_heads: H.
        head_dim: V, width of a head, over which statistics are taken.
        eps: added to the (biased) variance.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float = 1e-6):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self.bias = nn.Parameter(torch.zeros(num_heads * head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [T, H * V] to [T, H * V] of the same dtype."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        heads = wide.unflatten(-1, (self.num_heads, self.head_dim))
        normed = F.layer_norm(heads, (self.head_dim,), eps=self.eps).flatten(-2)
        return (normed * self.weight + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, eps={self.eps}"
