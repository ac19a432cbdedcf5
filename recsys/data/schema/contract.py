"""Lists the columns that a config reads from its event files, and checks a file's schema against them.

One list of `FileColumn`s decides which columns are read, which types they may have, which checks apply to
their values, and where the values go in a batch.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, reduce
from operator import and_
from typing import Literal

import pyarrow as pa

from recsys import protos as pb
from recsys.config import features
from recsys.config.checks import choices
from recsys.config.declarations import model_of
from recsys.config.feature_kinds import FeatureKind, Values
from recsys.data.arrow import is_list, is_text
from recsys.errors import DataError

Mode = Literal["train", "evaluate", "predict"]
"""The purpose of reading. Training and evaluation need labels and weights; prediction reads neither."""


class Kind(Enum):
    """The meaning of a column's values, which decides their types and their checks."""

    FEATURE = "feature"
    TIME = "time"
    ACTIONS = "actions"
    WATCH_TIME = "watch time"
    LABEL = "label"
    LABEL_BITS = "label bits"
    WEIGHT = "weight"


_TYPES = {Kind.TIME: Values.INTEGER, Kind.ACTIONS: Values.INTEGER, Kind.LABEL_BITS: Values.INTEGER}
"""Types of the values of a column; those of any other kind are numbers."""


@dataclass(frozen=True)
class FileColumn:
    """One column that is read from event files.

    Attributes:
        name: the column's name in the file.
        side: pb.USER (one value per row), pb.HISTORY or pb.CANDIDATE (one list per row).
        kind: meaning of the values.
        required: True if a file without the column is rejected.
        multi_valued: True if each element is a list of values.
        readers: the features that read the column; several only if each reads it in its own way.
        task: the task whose labels the column holds, if any.
    """

    name: str
    side: int
    kind: Kind
    required: bool = True
    multi_valued: bool = False
    readers: tuple[FeatureKind, ...] = ()
    task: pb.Task | None = None

    # These facts are computed once, because every table of every batch asks for them.
    @cached_property
    def depth(self) -> int:
        """Number of lists around a value: 0, 1 or 2."""
        return (self.side != pb.USER) + self.multi_valued

    @cached_property
    def values(self) -> Values:
        """Types that suit all readers of the column, which may be none; reads footers of vocabularies."""
        types = [kind.values for kind in self.readers]
        if self.kind is not Kind.FEATURE:
            types.append(_TYPES.get(self.kind, Values.NUMBER))
        return reduce(and_, types)

    @cached_property
    def signed(self) -> bool:
        """Whether numbers may be below 0."""
        return self.kind is Kind.FEATURE and all(kind.signed for kind in self.readers)

    @cached_property
    def nullable(self) -> bool:
        """Whether a value may be null."""
        return self.kind is Kind.FEATURE and all(kind.nullable for kind in self.readers)

    @cached_property
    def null_remedy(self) -> str:
        """End of the sentence about a null, which says how to write a missing value."""
        return self.readers[0].null_remedy if self.kind is Kind.FEATURE else ""

    @cached_property
    def largest(self) -> float:
        """Largest magnitude of a number."""
        return min((kind.largest for kind in self.readers), default=FeatureKind.largest)

    @property
    def vocabulary(self) -> str | None:
        """File of the ids that the values are, if any."""
        return next((kind.vocabulary.file for kind in self.readers if kind.vocabulary is not None), None)


def feature_columns(kind: FeatureKind, side: int) -> list[FileColumn]:
    """Returns the columns that a feature reads on a side; a file of items has one value in each row."""
    place = pb.USER if side == pb.ITEM else side
    return [
        FileColumn(name, place, Kind.FEATURE, multi_valued=kind.lists, readers=(kind,))
        for name in kind.columns(side)
    ]


def file_columns(pipeline: pb.Pipeline, mode: Mode) -> list[FileColumn]:
    """Returns the columns that a config and its model read for `mode`, without key columns."""
    model = model_of(pipeline)
    candidates = model.reads_candidates(mode)
    uih, candidate = features.PREFIX[pb.HISTORY], features.PREFIX[pb.CANDIDATE]
    inputs = [FileColumn(features.REQUEST_TIME, pb.USER, Kind.TIME)]
    # Features come first, so that errors about lists of unequal length compare with the items.
    for column in features.columns(pipeline):
        if column.side != pb.CANDIDATE or candidates:
            inputs += feature_columns(column.kind, column.side)
    inputs.append(FileColumn(uih + features.TIMESTAMPS, pb.HISTORY, Kind.TIME))
    action = action_encoder(pipeline)
    channels = getattr(model.preprocessor, "channels", ())
    if action.bits or any(channel.bits for channel in channels):
        inputs.append(FileColumn(uih + features.ACTIONS, pb.HISTORY, Kind.ACTIONS))
    if action.watch_time_thresholds or any(channel.HasField("min_watch_time") for channel in channels):
        inputs.append(FileColumn(uih + features.WATCH_TIME, pb.HISTORY, Kind.WATCH_TIME))
    if candidates:
        times = candidate + features.TIMESTAMPS
        inputs.append(FileColumn(times, pb.CANDIDATE, Kind.TIME, required=False))
    by_name: dict[str, FileColumn] = {}
    for column in inputs:
        earlier = by_name.get(column.name)
        by_name[column.name] = column if earlier is None else _shared(earlier, column)
    wanted = list(by_name.values())
    if mode != "predict":
        for name in dict.fromkeys(column.name for column in model.weight_columns()):
            wanted.append(FileColumn(name, features.side_of(name), Kind.WEIGHT))
        for task in model.tasks:
            kind = Kind.LABEL_BITS if task.label_bits else Kind.LABEL
            wanted.append(FileColumn(task.label, pb.CANDIDATE, kind, task=task))
    return wanted


def _shared(first: FileColumn, second: FileColumn) -> FileColumn:
    """Returns a column for the readers of both, of which at most one has a meaning without a feature."""
    column = first if second.kind is Kind.FEATURE else second
    readers, required = first.readers + second.readers, first.required or second.required
    return replace(column, readers=readers, required=required)


def key_columns(pipeline: pb.Pipeline) -> list[str]:
    """Returns the columns that identify a row or group rows; they are read unchanged."""
    group = group_column(pipeline)
    return list(dict.fromkeys([*pipeline.data.key_columns, *([group] if group else [])]))


def group_column(pipeline: pb.Pipeline) -> str | None:
    """Returns the column that groups rows for per-user metrics, or None if the config names no key at all."""
    return pipeline.data.group_column or None


def needed_columns(pipeline: pb.Pipeline, mode: Mode, schema: pa.Schema) -> list[str]:
    """Returns the names of the columns to read from files with this schema."""
    present = set(schema.names)
    wanted = [column.name for column in file_columns(pipeline, mode)] + key_columns(pipeline)
    return [name for name in dict.fromkeys(wanted) if name in present]


def check_schema(schema: pa.Schema, pipeline: pb.Pipeline, mode: Mode, path: str) -> None:
    """Compares the columns of one file with what the config reads.

    Raises:
        DataError: columns are missing, duplicated or have a wrong type; the message has one line for each.
    """
    findings = []
    for name in key_columns(pipeline):
        findings += _presence(schema, name, required=True) or _key_type(schema.field(name).type, name)
    _raise(findings + _findings(schema, file_columns(pipeline, mode)), schema, path)


def check_columns(schema: pa.Schema, wanted: list[FileColumn], path: str) -> None:
    """Compares the columns of one file with `wanted`, for files of any kind; raises like `check_schema`."""
    _raise(_findings(schema, wanted), schema, path)


def _findings(schema: pa.Schema, wanted: list[FileColumn]) -> list[str]:
    findings = []
    for column in wanted:
        problems = _presence(schema, column.name, column.required)
        findings += problems
        if not problems and column.name in schema.names:
            findings += type_findings(schema.field(column.name).type, column)
    return findings


def _raise(findings: list[str], schema: pa.Schema, path: str) -> None:
    if findings:
        lines = [f"{path}: {finding}" for finding in dict.fromkeys(findings)]
        raise DataError("\n".join([*lines, f"{path} has the columns {', '.join(schema.names)}."]))


def check_same_schema(
    schema: pa.Schema, path: str, first: pa.Schema, first_path: str, columns: list[str]
) -> None:
    """Checks that a file has the same types as the first file; pyarrow would cast or drop values silently.

    Raises:
        DataError: a column differs from the first file's.
    """
    for name in columns:
        if name not in schema.names:
            raise DataError(
                f"{path}: column {name} is missing, {first_path} has it. Make both with the same tool."
            )
        if schema.field(name).type != first.field(name).type:
            raise DataError(
                f"{path}: column {name} is {schema.field(name).type}, "
                f"in {first_path} it is {first.field(name).type}. "
                "All files of a source have the same types; rewrite one of them."
            )


def action_encoder(pipeline: pb.Pipeline) -> pb.ActionEncoder:
    """Returns the preprocessor's action encoder message, which is empty if the model reads no actions."""
    preprocessor = model_of(pipeline).preprocessor
    action = None if preprocessor is None else choices.part(preprocessor, "action")
    return action or pb.ActionEncoder()


def _presence(schema: pa.Schema, name: str, required: bool) -> list[str]:
    count = len(schema.get_all_field_indices(name))
    if count > 1:
        return [f"column {name} occurs {count} times. Keep one."]
    if count == 0 and required:
        close = difflib.get_close_matches(name, schema.names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        return [f"no column {name}.{hint} Rename the column or change the config."]
    return []


def type_findings(kind: pa.DataType, column: FileColumn) -> list[str]:
    """Returns what is wrong with the type of a column; nothing if it suits all readers."""
    inner, depth = kind, 0
    while is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    if not column.values:
        readers = ", ".join(kind.feature.name for kind in column.readers)
        return [f"column {column.name}: no type of values suits all its readers, the features {readers}."]
    allowed, fits = _allowed(column)
    if depth == column.depth and (fits(inner) or pa.types.is_null(inner)):
        return []
    wanted = "list of " * column.depth + allowed
    return [f"column {column.name} is {kind}; it must be {wanted}. Write the column with that type."]


def _key_type(kind: pa.DataType, name: str) -> list[str]:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not pa.types.is_nested(inner):
        return []
    problem = f"column {name} is {kind}; a key column has one number or text per row."
    return [f"{problem} Name another one in data.key_columns and data.group_column."]


def _allowed(column: FileColumn) -> tuple[str, Callable[[pa.DataType], bool]]:
    """Returns a description of the types that a column's values may have, and a test of a type."""
    values = column.values
    words = _WORDS[values] + (" seconds" if column.kind is Kind.TIME else "")
    if column.vocabulary is not None:
        words += f", as the ids in {column.vocabulary} are"
    tests = {
        Values.INTEGER: pa.types.is_integer,
        Values.REAL: lambda kind: pa.types.is_floating(kind) or pa.types.is_boolean(kind),
        Values.TEXT: is_text,
    }
    return words, lambda kind: any(test(kind) for flag, test in tests.items() if flag in values)


_WORDS = {
    Values.INTEGER: "int64",
    Values.TEXT: "string",
    Values.ID: "int64 or string",
    Values.NUMBER: "number",
}
