"""From features to a sequence of tokens.

Each takes `(config, *, pipeline)`, says with `layout_rule(config, pipeline)` how the reader lays out rows,
and turns `(embeddings, batch)` into `Preprocessed`; `flops(batch)` counts what that costs. A new one is a
module here and a line below.
"""

from recsys.modules.preprocessors.contextual import ContextualPreprocessor
from recsys.modules.preprocessors.preprocessed import EncodedPrefix, Preprocessed
from recsys.modules.preprocessors.uih import UihPreprocessor

__all__ = ["ContextualPreprocessor", "EncodedPrefix", "Preprocessed", "UihPreprocessor"]
