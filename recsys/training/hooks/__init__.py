"""Observers of a run: the console, `metrics.jsonl`, TensorBoard, the report. Only rank 0 has hooks."""

from recsys.training.hooks.base import Diagnosed, Evaluated, Hook, Outcome, Run, Trained

__all__ = ["Diagnosed", "Evaluated", "Hook", "Outcome", "Run", "Trained"]
