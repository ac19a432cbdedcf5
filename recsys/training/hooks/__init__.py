"""Hooks that observe a run: the console, `metrics.jsonl`, TensorBoard, the report, tracking services.

Only rank 0 has hooks.
"""

from recsys.training.hooks.base import Diagnosed, Evaluated, Hook, Outcome, Run, SplitMetrics, Trained
from recsys.training.hooks.mlflow import MlflowHook
from recsys.training.hooks.wandb import WandbHook

__all__ = [
    "Diagnosed",
    "Evaluated",
    "Hook",
    "MlflowHook",
    "Outcome",
    "Run",
    "SplitMetrics",
    "Trained",
    "WandbHook",
]
