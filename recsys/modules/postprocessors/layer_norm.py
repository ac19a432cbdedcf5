"""`LayerNormPostprocessor`: normalizes output tokens, with learned scale and shift."""

from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.norm import LayerNorm


@register(pb.LayerNormPostprocessor)
class LayerNormPostprocessor(nn.Module):
    """Applies a LayerNorm over E."""

    def __init__(self, config: pb.LayerNormPostprocessor, *, embedding_dim: int):
        super().__init__()
        self.norm = LayerNorm(embedding_dim, eps=config.eps)

    def forward(self, values: Tensor, timestamps: Tensor) -> Tensor:
        """Maps [n, E] to [n, E] of the same dtype; `timestamps` is not used."""
        return self.norm(values)
