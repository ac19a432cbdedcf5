"""Losses, one file each; importing the package registers them under their messages of `pb.Loss`.

`base` defines the interface of ranking losses; the retrieval loss has a different signature.
"""

from recsys.modules.losses.base import RankingLoss
from recsys.modules.losses.binary_cross_entropy import BinaryCrossEntropy
from recsys.modules.losses.focal import FocalLoss
from recsys.modules.losses.jrc import JrcLoss
from recsys.modules.losses.mean_squared_error import MeanSquaredError
from recsys.modules.losses.pairwise import PairwiseLoss
from recsys.modules.losses.softmax import SoftmaxLoss

__all__ = [
    "BinaryCrossEntropy",
    "FocalLoss",
    "JrcLoss",
    "MeanSquaredError",
    "PairwiseLoss",
    "RankingLoss",
    "SoftmaxLoss",
]
