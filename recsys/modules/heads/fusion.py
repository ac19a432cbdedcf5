"""`FusionHead`: multiplies user and item vectors, then applies one MLP for all tasks."""

from collections.abc import Sequence

from torch import Tensor, nn

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.heads.base import PairInput
from recsys.modules.mlp import build_mlp


@register(pb.FusionHead)
class FusionHead(nn.Module):
    """Computes logits = MLP(user * item), or of [user, item, user * item] if the config's input is CONCAT.

    Args:
        config: the MLP.
        embedding_dim: E, width of both vectors.
        num_outputs: number of logits of each task.
    """

    def __init__(self, config: pb.FusionHead, *, embedding_dim: int, num_outputs: Sequence[int]):
        super().__init__()
        self.input = PairInput(config.input, embedding_dim)
        self.mlp = build_mlp(config.mlp, self.input.width, sum(num_outputs))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Computes the logits of each candidate.

        Args:
            user: [N, E], target tokens as the mixer returns them.
            item: [N, E], the candidates' content before the mixer.

        Returns:
            [N, sum of num_outputs], task by task.
        """
        return self.mlp(self.input(user, item))
