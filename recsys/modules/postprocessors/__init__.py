"""What happens to output tokens before a head, one file each; importing the package registers them for
`pb.Postprocessor`.

Each takes `(config, *, embedding_dim)` and turns `(values [n, E], timestamps int64 [n])` into [n, E]; a
timestamp, in seconds, is when a token's answer is wanted: the request time of a target, the time of what
comes next for an event.
"""

from recsys.modules.postprocessors.l2_norm import L2NormPostprocessor
from recsys.modules.postprocessors.layer_norm import LayerNormPostprocessor
from recsys.modules.postprocessors.timestamp_layer_norm import TimestampLayerNormPostprocessor

__all__ = ["L2NormPostprocessor", "LayerNormPostprocessor", "TimestampLayerNormPostprocessor"]
