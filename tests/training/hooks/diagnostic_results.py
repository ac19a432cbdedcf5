"""Diagnostic results made by hand, for tests of the hooks that show them."""

import math

import torch

from recsys.modules.metrics.reliability import ReliabilityBin
from recsys.training.attention import AttentionPicture
from recsys.training.diagnostics import DiagnosticResults, Slice

PICTURE = AttentionPicture(
    sample="user 7",
    layer=2,
    num_layers=3,
    formula="silu(scores) / 65",
    weights=torch.tensor([[0.25, 0.0, 0.0], [-0.0625, 1.0, 0.0], [0.5, 0.0, 0.25]]),
    visible=torch.tensor([[True, False, False], [True, True, False], [True, True, True]]),
    kinds=torch.tensor([0, 1, 2], dtype=torch.int8),
    num_tokens=900,
)

RESULTS = DiagnosticResults(
    slices=[
        Slice(0, 0, 0, 0, {"click/auc": math.nan, "seconds/mae": math.nan}),
        Slice(1, 10, 1, 2, {"click/auc": math.nan, "seconds/mae": 1.25}),
        Slice(11, 5000, 1500, 4000, {"click/auc": 0.75, "seconds/mae": 2.5}),
    ],
    calibration={
        "click": [
            ReliabilityBin(400, 0.1, 0.2),
            ReliabilityBin(1200, 0.5, 0.4),
            ReliabilityBin(300, 0.8, 1.0),
        ]
    },
    pictures=[PICTURE],
)
