"""`MLP`: a stack of linear layers with SiLU between them, as `pb.Mlp` describes it.

It is used by heads, by the content and action encoders and for contextual tokens.
"""

from collections.abc import Sequence

from torch import nn

from recsys import protos as pb
from recsys.modules.norm import LayerNorm


class MLP(nn.Sequential):
    """Maps [..., in_dim] to [..., out_dim]: linear, norm, SiLU, dropout per hidden width, then linear.

    Args:
        in_dim: width of the input.
        hidden: widths of the layers before the last; if empty, the MLP is a single linear layer.
        out_dim: width of the output, which has neither norm nor activation.
        layer_norm: whether to apply a layer norm before each activation.
        dropout: probability of dropout after each activation, in training.
    """

    def __init__(
        self,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        layer_norm: bool = False,
        dropout: float = 0.0,
    ):
        layers: list[nn.Module] = []
        for width in hidden:
            layers.append(nn.Linear(in_dim, width))
            if layer_norm:
                layers.append(LayerNorm(width))
            layers.append(nn.SiLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            in_dim = width
        super().__init__(*layers, nn.Linear(in_dim, out_dim))


def build_mlp(config: pb.Mlp, in_dim: int, out_dim: int) -> MLP:
    """Builds the MLP that a message describes."""
    return MLP(in_dim, config.hidden, out_dim, layer_norm=config.layer_norm, dropout=config.dropout)
