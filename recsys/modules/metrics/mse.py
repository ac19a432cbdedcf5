"""`Mse`: the mean squared error."""

from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import PredictionMean


@register(pb.Mse)
class Mse(PredictionMean):
    """Mean squared error, in the square of the label's unit."""

    name = "mse"
    higher_is_better = False

    def __init__(self, config: pb.Mse):
        super().__init__()

    def values(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return (predictions - labels).square()
