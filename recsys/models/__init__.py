"""Models, built from the parts in `recsys.modules` and registered under their messages of `pb.Model`.

Importing the package declares every model and mixer to `recsys.config`, without importing torch. The names
below import the classes of all models and parts, which registers them.
"""

import importlib
from typing import TYPE_CHECKING

from recsys.models import (  # noqa: F401  they declare the models
    generator_declaration,
    ranker_declaration,
    retriever_declaration,
)
from recsys.modules import mixer_declarations  # noqa: F401

if TYPE_CHECKING:
    from recsys.models.base import Losses, Model, build_model, layout_rule
    from recsys.models.generator import CodeGenerator
    from recsys.models.ranker import Ranker
    from recsys.models.retriever import Retriever, RetrieverOutputs

__all__ = [
    "CodeGenerator",
    "Losses",
    "Model",
    "Ranker",
    "Retriever",
    "RetrieverOutputs",
    "build_model",
    "layout_rule",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("recsys.models.components"), name)
