"""Metrics, one file each; importing the package registers them under their messages of `pb.Metric`.

All are torchmetrics: each rank calls `update` with its rows, then all ranks call `compute`, which returns the
value over all rows on every rank. `base` defines their states.
"""

from recsys.modules.metrics.auc import Auc
from recsys.modules.metrics.base import AllRows, PredictionMean, RankMean
from recsys.modules.metrics.calibration import Calibration
from recsys.modules.metrics.gauc import Gauc
from recsys.modules.metrics.hit_rate import HitRate
from recsys.modules.metrics.log_loss import LogLoss
from recsys.modules.metrics.mae import Mae
from recsys.modules.metrics.mrr import Mrr
from recsys.modules.metrics.mse import Mse
from recsys.modules.metrics.ndcg import Ndcg
from recsys.modules.metrics.normalized_entropy import NormalizedEntropy

__all__ = [
    "AllRows",
    "Auc",
    "Calibration",
    "Gauc",
    "HitRate",
    "LogLoss",
    "Mae",
    "Mrr",
    "Mse",
    "Ndcg",
    "NormalizedEntropy",
    "PredictionMean",
    "RankMean",
]
