"""`L2NormPostprocessor`: scales output tokens to unit length, so that inner products are cosines."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys import protos as pb
from recsys.config.registry import register


@register(pb.L2NormPostprocessor)
class L2NormPostprocessor(nn.Module):
    """Computes x / max(|x|, eps), with the norm in at least float32."""

    def __init__(self, config: pb.L2NormPostprocessor, *, embedding_dim: int):
        super().__init__()
        if not config.eps > 0:
            raise ValueError(f"eps: {config.eps} is given; it must be above 0, or a zero vector becomes NaN")
        self.embedding_dim = embedding_dim
        self.eps = config.eps

    def forward(self, values: Tensor, timestamps: Tensor) -> Tensor:
        """Maps [n, E] to [n, E] of the same dtype; `timestamps` is not used."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        return F.normalize(wide, dim=-1, eps=self.eps).to(values.dtype)

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, eps={self.eps}"
