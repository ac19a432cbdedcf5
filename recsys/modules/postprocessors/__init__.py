"""Postprocessors, one file each, which transform output tokens before a head.

Importing the package registers them under their messages of `pb.Postprocessor`. A postprocessor takes
`(config, *, embedding_dim)` and maps `(values [n, E], timestamps int64 [n])` to [n, E]. Timestamps are in
seconds: for a target the time of its request, for an event the time of the next event.
"""

from recsys.modules.postprocessors.l2_norm import L2NormPostprocessor
from recsys.modules.postprocessors.layer_norm import LayerNormPostprocessor
from recsys.modules.postprocessors.timestamp_layer_norm import TimestampLayerNormPostprocessor

__all__ = ["L2NormPostprocessor", "LayerNormPostprocessor", "TimestampLayerNormPostprocessor"]
