"""User times item, then one MLP for all tasks: the head of the ranking model."""

from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.mlp import MLP
from recsys.registry import register


@register(pb.FusionHead)
class FusionHead(nn.Module):
    """logits = MLP(user * item).

    Args:
        config: its MLP.
        embedding_dim: E, width of both vectors.
        num_outputs: logits a candidate, one a task.
    """

    def __init__(self, config: pb.FusionHead, *, embedding_dim: int, num_outputs: int):
        super().__init__()
        mlp = config.mlp
        self.mlp = MLP(embedding_dim, mlp.hidden, num_outputs, layer_norm=mlp.layer_norm, dropout=mlp.dropout)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Logits of each candidate.

        Args:
            user: [N, E] target tokens behind the mixer.
            item: [N, E] the candidates' content before it.

        Returns:
            [N, num_outputs].
        """
        return self.mlp(user * item)
