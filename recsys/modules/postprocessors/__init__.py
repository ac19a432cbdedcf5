"""Postprocessors change output tokens before a head, one file each; importing the package registers them
under their messages of `pb.Postprocessor`.

A postprocessor takes `(config, *, embedding_dim)` and maps `(values [n, E], timestamps int64 [n])` to [n, E].
A timestamp, in seconds, is the request time of a target, or the time of the next event for an event.
"""

from recsys.modules.postprocessors.l2_norm import L2NormPostprocessor
from recsys.modules.postprocessors.layer_norm import LayerNormPostprocessor
from recsys.modules.postprocessors.timestamp_layer_norm import TimestampLayerNormPostprocessor

__all__ = ["L2NormPostprocessor", "LayerNormPostprocessor", "TimestampLayerNormPostprocessor"]
