"""Preprocessors turn the features of a batch into sequences of tokens.

A preprocessor takes `(config, *, pipeline)` and maps `(inputs, batch)` to `Preprocessed`. Its
`layout_rule(config, pipeline)` tells the reader how to lay out rows, and `flops(batch)` counts the cost. To
add a preprocessor, write a module here and a line below.
"""

from recsys.modules.preprocessors.contextual import ContextualPreprocessor
from recsys.modules.preprocessors.preprocessed import EncodedPrefix, Preprocessed
from recsys.modules.preprocessors.uih import UihPreprocessor

__all__ = ["ContextualPreprocessor", "EncodedPrefix", "Preprocessed", "UihPreprocessor"]
