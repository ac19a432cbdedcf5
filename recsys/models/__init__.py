"""The models: parts from `recsys.modules` put together, each registered under its message of `pb.Model`.

Importing the package registers every model and every part that a config can name.
"""

from recsys.models.base import Losses, Model, build_model, layout_rule
from recsys.models.ranker import Ranker, RankerOutputs
from recsys.models.retriever import Retriever, RetrieverOutputs
from recsys.modules import heads, losses, metrics, mixers, postprocessors, preprocessors  # noqa: F401

__all__ = [
    "Losses",
    "Model",
    "Ranker",
    "RankerOutputs",
    "Retriever",
    "RetrieverOutputs",
    "build_model",
    "layout_rule",
]
