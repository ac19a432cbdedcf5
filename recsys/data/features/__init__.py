"""The built-in kinds of features, each registered under its message (see `config.feature_kinds`)."""

from recsys.data.features.id import IdFeature
from recsys.data.features.numeric import NumericFeature

__all__ = ["IdFeature", "NumericFeature"]
