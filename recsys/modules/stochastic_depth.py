"""`StochasticDepth`: in training, each sample skips a layer with some probability."""

import torch
from torch import Tensor, nn

from recsys.ops import SequenceLayout


class StochasticDepth(nn.Module):
    """The factor of a layer's residual branch: 0 for samples that skip the layer, 1 / (1 - p) for the others.

    The expected factor equals that of evaluation, 1. Source: Huang et al., arXiv 1603.09382, with the scaling
    moved from evaluation to training.

    Args:
        probability: p, at least 0 and below 1, with which a sample skips the layer.
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, layout: SequenceLayout) -> Tensor | None:
        """Draws float32 [T, 1], equal for all tokens of a sample; None if the factor is 1 for all."""
        if not self.training or self.probability == 0:
            return None
        drawn = torch.rand(layout.batch_size, device=layout.device)
        factor = (drawn >= self.probability) / (1 - self.probability)
        return torch.repeat_interleave(factor, layout.lengths, output_size=layout.total_len)[:, None]

    def extra_repr(self) -> str:
        return f"{self.probability}"


def linear_schedule(probability: float, num_layers: int) -> list[float]:
    """Returns the probabilities of layers 1 to n, which grow in equal steps up to `probability`."""
    return [probability * number / num_layers for number in range(1, num_layers + 1)]
