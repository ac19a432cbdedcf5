"""The columns that a config reads from its event files, and the check of a file's schema against them.

One list of `Field`s drives everything that knows about columns: which are read, what type they may have,
which checks their values pass, where they go in a batch.
"""

import difflib
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import pyarrow as pa

from recsys import protos as pb
from recsys.config import features
from recsys.config.checks import choices
from recsys.config.declarations import model_of
from recsys.data.arrow import is_text
from recsys.data.schema.vocabulary import id_type
from recsys.errors import DataError

Mode = Literal["train", "evaluate", "predict"]
"""What rows are read for. Training and evaluation want labels; prediction does not look at them."""


class Kind(Enum):
    """What the values of a column mean; it decides their type and their checks."""

    ID = "id"
    NUMBER = "number"
    TIME = "time"
    ACTIONS = "actions"
    WATCH_TIME = "watch time"
    LABEL = "label"
    LABEL_BITS = "label bits"


@dataclass(frozen=True)
class Field:
    """One column that is read.

    Attributes:
        column: its name in the file.
        side: pb.USER (a value a row), pb.HISTORY or pb.CANDIDATE (a list a row).
        kind: what its values mean.
        required: a file without it is refused.
        multi_valued: a list where others have one value.
        feature: the feature that it belongs to, if any.
        task: the task whose label it is, if any.
    """

    column: str
    side: int
    kind: Kind
    required: bool = True
    multi_valued: bool = False
    feature: pb.Feature | None = None
    task: pb.Task | None = None

    @property
    def depth(self) -> int:
        """Lists around a value: 0, 1 or 2."""
        return (self.side != pb.USER) + self.multi_valued


def fields(pipeline: pb.Pipeline, mode: Mode) -> list[Field]:
    """The columns of a resolved config, key columns aside; its model says whether it reads candidates."""
    model = model_of(pipeline)
    candidates = model.reads_candidates(mode)
    uih, candidate = features.PREFIX[pb.HISTORY], features.PREFIX[pb.CANDIDATE]
    found = [Field(features.REQUEST_TIME, pb.USER, Kind.TIME)]
    # Features first: what is said about lists of unequal length then compares with the items.
    for column in features.columns(pipeline):
        if column.side != pb.CANDIDATE or candidates:
            kind = Kind.ID if column.feature.HasField("id") else Kind.NUMBER
            multi_valued, feature = column.multi_valued, column.feature
            found.append(Field(column.name, column.side, kind, multi_valued=multi_valued, feature=feature))
    found.append(Field(uih + features.TIMESTAMPS, pb.HISTORY, Kind.TIME))
    action = action_encoder(pipeline)
    channels = getattr(model.preprocessor, "channels", ())
    if action.bits or any(channel.bits for channel in channels):
        found.append(Field(uih + features.ACTIONS, pb.HISTORY, Kind.ACTIONS))
    if action.watch_time_thresholds or any(channel.HasField("min_watch_time") for channel in channels):
        found.append(Field(uih + features.WATCH_TIME, pb.HISTORY, Kind.WATCH_TIME))
    if candidates:
        found.append(Field(candidate + features.TIMESTAMPS, pb.CANDIDATE, Kind.TIME, required=False))
    if mode != "predict":
        for task in model.tasks:
            kind = Kind.LABEL_BITS if task.label_bits else Kind.LABEL
            found.append(Field(task.label, pb.CANDIDATE, kind, task=task))
    return found


def key_columns(pipeline: pb.Pipeline) -> list[str]:
    """Columns that identify a row and group rows, read as they stand."""
    group = group_column(pipeline)
    return list(dict.fromkeys([*pipeline.data.key_columns, *([group] if group else [])]))


def group_column(pipeline: pb.Pipeline) -> str | None:
    """Column that groups rows for per-user metrics; None when the config names no key at all."""
    return pipeline.data.group_column or None


def needed_columns(pipeline: pb.Pipeline, mode: Mode, schema: pa.Schema) -> list[str]:
    """Names of the columns to read from files of this schema."""
    present = set(schema.names)
    wanted = [field.column for field in fields(pipeline, mode)] + key_columns(pipeline)
    return [name for name in dict.fromkeys(wanted) if name in present]


def check_schema(schema: pa.Schema, pipeline: pb.Pipeline, mode: Mode, path: str) -> None:
    """Compares the columns of one file with what the config reads.

    Raises:
        DataError: every missing, doubled or wrongly typed column, one line each.
    """
    findings = []
    for name in key_columns(pipeline):
        findings += _presence(schema, name, required=True) or _key_type(schema.field(name).type, name)
    _raise(findings + _findings(schema, fields(pipeline, mode)), schema, path)


def check_fields(schema: pa.Schema, wanted: list[Field], path: str) -> None:
    """`check_schema` of a file with other columns than events have."""
    _raise(_findings(schema, wanted), schema, path)


def _findings(schema: pa.Schema, wanted: list[Field]) -> list[str]:
    findings = []
    for field in wanted:
        problems = _presence(schema, field.column, field.required)
        findings += problems
        if not problems and field.column in schema.names:
            findings += _type(schema.field(field.column).type, field)
    return findings


def _raise(findings: list[str], schema: pa.Schema, path: str) -> None:
    if findings:
        lines = [f"{path}: {finding}" for finding in dict.fromkeys(findings)]
        raise DataError("\n".join([*lines, f"{path} has the columns {', '.join(schema.names)}."]))


def check_same_schema(
    schema: pa.Schema, path: str, first: pa.Schema, first_path: str, columns: list[str]
) -> None:
    """All files of a source have the same types; pyarrow would cast or drop in silence.

    Raises:
        DataError: a column that differs from the first file's.
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
                "All files of a source have the same types; write one of them anew."
            )


def action_encoder(pipeline: pb.Pipeline) -> pb.ActionEncoder:
    """The message that says which actions the model's preprocessor reads; empty if it reads none."""
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


def _type(given: pa.DataType, field: Field) -> list[str]:
    inner, depth = given, 0
    while _is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if pa.types.is_dictionary(inner):
        inner = inner.value_type
    allowed, fits = _allowed(field)
    if depth == field.depth and (fits(inner) or pa.types.is_null(inner)):
        return []
    wanted = "list of " * field.depth + allowed
    return [f"column {field.column} is {given}; it must be {wanted}. Write the column with that type."]


def _key_type(given: pa.DataType, name: str) -> list[str]:
    inner = given.value_type if pa.types.is_dictionary(given) else given
    if not pa.types.is_nested(inner):
        return []
    what = f"column {name} is {given}; a key column has one number or text a row."
    return [f"{what} Name another one in data.key_columns and data.group_column."]


def _is_list(given: pa.DataType) -> bool:
    return pa.types.is_list(given) or pa.types.is_large_list(given) or pa.types.is_fixed_size_list(given)


def _allowed(field: Field):
    """The words for, and the test of, the types that a field's values may have."""
    if field.kind in (Kind.TIME, Kind.ACTIONS, Kind.LABEL_BITS):
        return ("int64 seconds" if field.kind is Kind.TIME else "int64"), pa.types.is_integer
    if field.kind is not Kind.ID:
        return "number", _is_number
    mapping = field.feature.id
    if mapping.HasField("hash"):
        return "int64 or string", lambda t: pa.types.is_integer(t) or is_text(t)
    if is_text(id_type(mapping.vocabulary.file)):
        return f"string, as the ids in {mapping.vocabulary.file} are", is_text
    return f"int64, as the ids in {mapping.vocabulary.file} are", pa.types.is_integer


def _is_number(given: pa.DataType) -> bool:
    return pa.types.is_integer(given) or pa.types.is_floating(given) or pa.types.is_boolean(given)
