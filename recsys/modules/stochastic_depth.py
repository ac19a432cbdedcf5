"""`StochasticDepth`: in training, each sample skips a layer with some probability."""

import torch
from torch import Tensor, nn

from recsys.ops import SequenceLayout


class StochasticDepth(nn.Module):
    """Draws the factor of a layer's residual branch: 0 for samples that skip the layer, else 1 / (1 - p).

    The expected factor is 1, the factor in evaluation. Source: Huang et al., arXiv 1603.09382, with the
    scaling moved from evaluation to training.

    Args:
        probability: p, the probability that a sample skips the layer, at least 0 and below 1.
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, layout: SequenceLayout) -> Tensor | None:
        """Draws factors, float32 [T, 1], equal for all tokens of a sample; None if all factors are 1."""
        if not self.training or self.probability == 0:
            return None
        drawn = torch.rand(layout.batch_size, device=layout.device)
        factor = (drawn >= self.probability) / (1 - self.probability)
        return torch.repeat_interleave(factor, layout.lengths, output_size=layout.total_len)[:, None]

    def extra_repr(self) -> str:
        return f"{self.probability}"


def linear_schedule(probability: float, num_layers: int) -> list[float]:
    """Returns the probabilities of layers 1 to `num_layers`, which grow in equal steps to `probability`."""
    return [probability * number / num_layers for number in range(1, num_layers + 1)]
