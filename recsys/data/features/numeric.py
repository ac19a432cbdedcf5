"""`NumericFeature`: a number that is scaled, or cut into buckets with embedding rows."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys import protos as pb
from recsys.config.checks.walk import Finding
from recsys.config.declarations import Choice
from recsys.config.feature_kinds import FeatureKind
from recsys.config.registry import register
from recsys.data.arrow import floats
from recsys.data.schema.vocabulary import Buckets, normalize


@register(pb.NumericFeature)
class NumericFeature(FeatureKind):
    """Scales numbers, or maps them to buckets, each of which is a table row."""

    null_remedy = "; numeric.fill of the feature gives nulls a value"

    @property
    def nullable(self) -> bool:
        """Whether a value replaces nulls."""
        return self.config.HasField("fill")

    @property
    def largest(self) -> float:
        """The largest number whose scaled value fits float32; any if its logarithm or bucket is used."""
        scaling = self.config.normalize
        if self._buckets or scaling.log1p:
            return float(np.finfo(np.float64).max)
        return super().largest * scaling.std - abs(scaling.mean)

    @property
    def table(self) -> str | None:
        """The feature's name, if buckets are embedded."""
        return self.feature.name if self._buckets else None

    @property
    def rows(self) -> int:
        """The number of buckets."""
        return len(self.config.bucketize.boundaries) + 1

    @property
    def width(self) -> int:
        """Width of the table, or 1 for a scaled number."""
        return self.config.bucketize.embedding_dim if self._buckets else 1

    @property
    def width_path(self) -> str:
        """Path of the width in the message of the buckets."""
        return f"{self.path}.bucketize.embedding_dim"

    @property
    def _buckets(self) -> bool:
        return self.config.HasField("bucketize")

    def choices(self, pipeline: pb.Pipeline) -> Iterator[Choice]:
        """Derives the width of buckets."""
        if self._buckets:
            width = pipeline.model.embedding_dim
            path = f"{self.path}.bucketize"
            yield Choice(self.config.bucketize, path, "embedding_dim", width, "model.embedding_dim")

    def findings(self) -> Iterator[Finding]:
        """Checks that boundaries increase."""
        limits = self.config.bucketize.boundaries
        if any(low >= high for low, high in zip(limits, limits[1:], strict=False)):
            yield Finding(f"{self.path}.bucketize.boundaries", "they must increase")

    def meaning(self, fingerprint: str | None) -> Any:
        """Returns the boundaries."""
        return ("boundaries", *self.config.bucketize.boundaries)

    def mapping(self) -> Buckets | None:
        """Returns the buckets, if there are any."""
        return Buckets(list(self.config.bucketize.boundaries)) if self._buckets else None

    def convert(self, columns: Sequence[pa.Array], mapping: Any) -> np.ndarray:
        """Fills nulls, then maps numbers to buckets or scales them."""
        (values,) = columns
        numbers = floats(values)
        if values.null_count:
            nulls = pc.is_null(values).to_numpy(zero_copy_only=False)
            numbers = np.where(nulls, self.config.fill, numbers.astype(np.float64, copy=False))
        if self._buckets:
            return mapping.map(numbers, np.int32)
        return normalize(numbers, self.config.normalize)
