"""`FeatureKind`: the interface of a kind of feature: the columns that it reads, and the vector that it makes.

Every kind is a class that is registered under its message, the built-in ones in `data.features`. The reader,
the embedding tables, the export signature, the serving schema and the checks ask the kind, and do not know
which kinds there are. A kind is created often, so its constructor must be cheap and must not open files.
"""

from collections.abc import Iterator, Sequence
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from recsys import protos as pb
from recsys.config import fields, registry
from recsys.config.checks.walk import Finding
from recsys.config.declarations import Choice

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from torch import nn

PREFIX = {pb.USER: "", pb.HISTORY: "uih_", pb.CANDIDATE: "candidate_", pb.ITEM: "catalogue_"}
"""Prefix of a feature's column on each side. Columns of side ITEM have it only in batches; in
`data.item_file` they have the feature's name."""

_LARGEST_FLOAT32 = 3.4028234663852886e38


class Values(Flag):
    """The types that the values of a column may have in a file. Several readers of a column intersect them.

    `NUMBER` accepts integers, floating-point numbers and booleans; `ID` accepts integers and texts.
    """

    INTEGER = auto()
    REAL = auto()
    TEXT = auto()
    NUMBER = INTEGER | REAL
    ID = INTEGER | TEXT


class Ragged(NamedTuple):
    """Table rows of elements, such as events, that have any number of rows each.

    Attributes:
        values: integers, the table rows of all elements one after the other.
        counts: int64 [elements], number of table rows of each element.
    """

    values: "np.ndarray"
    counts: "np.ndarray"


class FeatureKind:
    """Reads one feature and makes a vector of it.

    A feature with a `table` becomes rows of that embedding table, which are looked up; any other becomes
    float32 numbers. `module` may map either, `input_width` wide, to the `width` that the model receives.

    Args:
        config: the kind's message.
        feature: the feature around it.
        path: path of the feature in the pipeline, such as `features[0]`.

    Attributes:
        path: path of `config` in the pipeline, such as `features[0].id`.
        feature_path: path of the feature.
    """

    nullable: bool = False
    """True if nulls reach `convert`. Otherwise a row with a null is a bad row."""

    null_remedy: str = ""
    """End of the sentence about a null, which says how to write a missing value."""

    largest: float = _LARGEST_FLOAT32
    """Largest magnitude of a number in the file."""

    lists: bool = False
    """True if each row, event or candidate has a list of values in the file. `convert` gets the values of all
    lists one after the other and returns a table row for each."""

    pooling: int = pb.SUM
    """Pooling of the looked-up rows of an element if there may be several: pb.SUM or pb.MEAN."""

    def __init__(self, config: Any, *, feature: pb.Feature, path: str):
        self.config, self.feature, self.feature_path = config, feature, path
        field = fields.chosen(feature)
        self.path = path if field is None else f"{path}.{fields.name_of(field)}"

    @property
    def values(self) -> Values:
        """The types that values may have in the file."""
        return Values.NUMBER

    @property
    def signed(self) -> bool:
        """Whether numbers may be below 0; by default if they may be floating-point numbers."""
        return Values.REAL in self.values

    @property
    def table(self) -> str | None:
        """Name of the embedding table; None if the feature has none. Features may share a table."""
        return None

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return 0

    @property
    def width(self) -> int:
        """Width of the vector that the model receives."""
        return 1

    @property
    def input_width(self) -> int:
        """Width of the table, or count of the numbers that `convert` makes for each element."""
        return self.width

    @property
    def multi_valued(self) -> bool:
        """Whether an element may have any number of table rows, which are pooled."""
        return self.lists

    @property
    def vocabulary(self) -> pb.Vocabulary | None:
        """The message in `config` of the vocabulary that maps ids to table rows; None if there is none.

        It must be in the field `vocabulary`. Runs and packages keep copies of its file.
        """
        return None

    @property
    def width_path(self) -> str:
        """Path of the field that decides the width of the table."""
        return f"{self.path}.embedding_dim"

    def columns(self, side: int) -> tuple[str, ...]:
        """Returns the columns of the file that the feature reads on a side; they may be columns of other
        features or times. Columns of events begin with `uih_`, those of candidates with `candidate_`."""
        return (("" if side == pb.ITEM else PREFIX[side]) + self.feature.name,)

    def choices(self, pipeline: pb.Pipeline) -> Iterator[Choice]:
        """Yields values for fields that the config, not yet resolved, leaves open."""
        return iter(())

    def findings(self) -> Iterator[Finding]:
        """Yields violations of the kind's rules across fields. The config may also be wrong elsewhere."""
        return iter(())

    def warnings(self) -> Iterator[Finding]:
        """Yields warnings about settings, as written, that have no effect or a surprising one."""
        return iter(())

    def table_facts(self) -> dict[str, Any]:
        """Returns values that all features of a table must have in common, by the field that decides them.

        The field is given within `config`; "" stands for the whole message.
        """
        return {"": str(self.config)}

    def meaning(self, fingerprint: str | None) -> Any:
        """Returns a value that is equal for two tables whose rows stand for the same values.

        Args:
            fingerprint: SHA-256 of the vocabulary file, if there is one.
        """
        return type(self.config).__name__, fingerprint or str(self.config)

    def mapping(self) -> Any:
        """Returns what `convert` needs to map values to table rows, such as a prepared search.

        It is built once per table and process. With a vocabulary it is a `Vocabulary` and this method is not
        called.
        """
        return None

    def convert(self, columns: "Sequence[pa.Array]", mapping: Any) -> "np.ndarray | Ragged":
        """Converts values from the file, in a reader process.

        Args:
            columns: the values of each of `columns(side)`, without lists around them, [n] each.
            mapping: the result of `mapping`, or the table's `Vocabulary`.

        Returns:
            With a table: its rows, integers [n], or `Ragged` if `multi_valued` is true and `lists` is not.
            Without: float32 [n] if `input_width` is 1, else [n, input_width].
        """
        raise NotImplementedError(f"{type(self).__name__}.convert")

    def module(self) -> "nn.Module | None":
        """Builds a module from [n, input_width] to [n, width]; None if the two are the same.

        All sides share it. It must accept n = 0, and `torch.export` must be able to trace it.
        """
        return None


def kinds(pipeline: pb.Pipeline) -> list[FeatureKind]:
    """Returns the kind of each feature of a config."""
    return [kind_of(feature, f"features[{index}]") for index, feature in enumerate(pipeline.features)]


def kind_of(feature: pb.Feature, path: str = "feature") -> FeatureKind:
    """Returns the kind of a feature at a path.

    The result is a plain `FeatureKind` if the feature has none, or one without a class, which `checks`
    reports.
    """
    field = fields.chosen(feature)
    if field is None:
        return FeatureKind(feature, feature=feature, path=path)
    config = fields.value_of(feature, field)
    kind = registry.feature_kind(type(config)) or FeatureKind
    return kind(config, feature=feature, path=path)
