"""`Mae`: the mean absolute error."""

from torch import Tensor

from recsys import protos as pb
from recsys.config.registry import register
from recsys.modules.metrics.base import PredictionMean


@register(pb.Mae)
class Mae(PredictionMean):
    """Mean absolute error in the label's unit."""

    name = "mae"
    higher_is_better = False

    def __init__(self, config: pb.Mae):
        super().__init__()

    def values(self, predictions: Tensor, labels: Tensor) -> Tensor:
        return (predictions - labels).abs()
