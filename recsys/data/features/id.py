"""`IdFeature`: ids with embedding rows of their own, found in a vocabulary or by a hash."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recsys import protos as pb
from recsys.config.checks.walk import Finding
from recsys.config.declarations import Choice
from recsys.config.feature_kinds import FeatureKind, Values
from recsys.config.registry import register
from recsys.data.schema.vocabulary import HashBuckets, id_values, row_type


@register(pb.IdFeature)
class IdFeature(FeatureKind):
    """Maps ids to table rows; a multi-valued feature has a list of ids, whose rows are pooled."""

    signed = False
    null_remedy = "; write a missing id as an id that is not in the vocabulary, such as an empty text"

    @property
    def values(self) -> Values:
        """The type of the vocabulary's ids; integers and texts if they are hashed."""
        return Values.ID if self.vocabulary is None else id_values(self.vocabulary)

    @property
    def table(self) -> str:
        """Name of the table, by default the feature's."""
        return self.config.table or self.feature.name

    @property
    def rows(self) -> int:
        """The number of buckets, or of ids and one row for all others, which is row 0."""
        return self.config.hash.num_buckets if self._hashes else self.config.vocabulary.size + 1

    @property
    def width(self) -> int:
        """Width of the table."""
        return self.config.embedding_dim

    @property
    def lists(self) -> bool:
        """Whether the feature is multi-valued."""
        return self.config.multi_valued

    @property
    def pooling(self) -> int:
        """Pooling of a multi-valued feature."""
        return self.config.pooling

    @property
    def vocabulary(self) -> pb.Vocabulary | None:
        """The vocabulary; None if ids are hashed."""
        return self.config.vocabulary if self.config.HasField("vocabulary") else None

    @property
    def _hashes(self) -> bool:
        return self.config.HasField("hash")

    def choices(self, pipeline: pb.Pipeline) -> Iterator[Choice]:
        """Derives table, width, and the file of the vocabulary."""
        yield Choice(self.config, self.path, "table", self.feature.name, f"{self.feature_path}.name")
        yield Choice(
            self.config, self.path, "embedding_dim", pipeline.model.embedding_dim, "model.embedding_dim"
        )

    def warnings(self) -> Iterator[Finding]:
        """Warns of a pooling without effect."""
        if self.config.pooling == pb.MEAN and not self.config.multi_valued:
            yield Finding(f"{self.path}.pooling", "without effect: the feature is not multi_valued")

    def table_facts(self) -> dict[str, Any]:
        """Returns width, mapping and initial values."""
        mapping = f"vocabulary {self.config.vocabulary.file}" if self.vocabulary is not None else "no mapping"
        if self._hashes:
            mapping = f"hash into {self.rows}"
        init_from = self.config.init_from.parquet or "none"
        return {"embedding_dim": self.width, "": mapping, "init_from": init_from}

    def meaning(self, fingerprint: str | None) -> Any:
        """Returns the vocabulary's fingerprint, or the number of buckets."""
        return ("hash", self.rows) if self._hashes else ("vocabulary", fingerprint)

    def mapping(self) -> HashBuckets:
        """Returns the hash of a feature without a vocabulary."""
        return HashBuckets(self.config.hash.num_buckets)

    def convert(self, columns: Sequence[pa.Array], mapping: Any) -> np.ndarray:
        """Maps ids to table rows."""
        return mapping.map(columns[0], row_type(mapping.rows))
