"""Registers the class of every model and of every part that a config can name, by importing it."""

from recsys.models.base import Losses, Model, build_model, layout_rule
from recsys.models.generator import CodeGenerator
from recsys.models.ranker import Ranker
from recsys.models.retriever import Retriever, RetrieverOutputs
from recsys.modules import heads, losses, metrics, mixers, postprocessors, preprocessors

__all__ = [
    "CodeGenerator",
    "Losses",
    "Model",
    "Ranker",
    "Retriever",
    "RetrieverOutputs",
    "build_model",
    "heads",
    "layout_rule",
    "losses",
    "metrics",
    "mixers",
    "postprocessors",
    "preprocessors",
]
