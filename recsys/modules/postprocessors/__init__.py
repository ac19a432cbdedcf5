"""Output normalisations, one file each; importing the package registers them for `pb.Postprocessor`."""

from recsys.modules.postprocessors.l2_norm import L2NormPostprocessor
from recsys.modules.postprocessors.layer_norm import LayerNormPostprocessor

__all__ = ["L2NormPostprocessor", "LayerNormPostprocessor"]
