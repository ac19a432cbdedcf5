"""Pydantic models of requests and answers, built from the columns that a package reads. OpenAPI uses them.

A config may give features any name, so fields have neutral names, with the column's name as alias.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from recsys import protos as pb
from recsys.config import features
from recsys.config.feature_kinds import Values
from recsys.data.schema.contract import FileColumn, Kind, file_columns

MOST_FINDINGS = 20
"""Most faults of a request that an answer names."""

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

_Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

_MEANING = {
    Kind.TIME: "seconds since 1970",
    Kind.ACTIONS: "bitmask of actions",
    Kind.WATCH_TIME: "seconds watched",
}


_NUMBERS = "numbers"
_IDS = "original ids; ids that the package does not know count as unknown"


class Finding(BaseModel):
    """One fault of a request."""

    field: str = Field(
        description="Place in the request, such as rows[3].uih_item_id[2]; empty for the whole."
    )
    message: str


class Failure(BaseModel):
    """The body of every response that reports an error."""

    error: str
    findings: list[Finding] = []


class InvalidRequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        failure: the body of the answer.
    """

    def __init__(self, status: int, failure: Failure) -> None:
        super().__init__(failure.error)
        self.status, self.failure = status, failure


def refused(field: str, message: str) -> InvalidRequestError:
    """Returns the error about a request that has one fault."""
    return unfit([Finding(field=field, message=message)])


def unfit(findings: list[Finding], error: str = "the request does not fit") -> InvalidRequestError:
    """Returns the error about a request that has faults, with the first of them."""
    more = len(findings) - MOST_FINDINGS
    said = f"{error}{f'; {more} more findings' if more > 0 else ''}"
    return InvalidRequestError(422, Failure(error=said, findings=findings[:MOST_FINDINGS]))


@dataclass(frozen=True)
class RequestLimits:
    """Bounds of one request: its rows, and the events and candidates of each of them."""

    rows: int
    history: int
    candidates: int


class RequestSchema:
    """The columns that a package reads, as pydantic models.

    Args:
        pipeline: resolved config of the package.
        key_columns: names of columns that are returned unchanged; optional in a request.
        outputs: names of the columns of an answer.
        max_items: number of items that can be recommended; None for a model that scores candidates.
        limits: bounds of a request.

    Attributes:
        keys: names of the key columns.
        read: the columns that the package reads, and whether a request must have them.
        request: pydantic model of the body of a request.
        answer: pydantic model of the body of its answer.
    """

    def __init__(
        self,
        pipeline: pb.Pipeline,
        key_columns: list[str],
        outputs: dict[str, Any],
        max_items: int | None,
        limits: RequestLimits,
    ) -> None:
        columns = file_columns(pipeline, "predict")
        self.read = {column.name: column.required for column in columns}
        self._top, self._max_items = pipeline.predict.top_k, max_items
        taken = {column.name for column in columns}
        self.keys = list(key_columns)
        fields = {f"f{i}": _declared(column, limits) for i, column in enumerate(columns)}
        echoed = [name for name in key_columns if name not in taken]
        about = "Returned unchanged; not used otherwise."
        fields |= {
            f"k{i}": (int | str | None, Field(None, alias=name, description=about))
            for i, name in enumerate(echoed)
        }
        self._names = {**{c.name: f"f{i}" for i, c in enumerate(columns)}}
        self._names |= {name: f"k{i}" for i, name in enumerate(echoed)}
        row = create_model("Row", __config__=_STRICT, __doc__="A user at a point in time.", **fields)
        body: dict[str, Any] = {
            "rows": (list[row], Field(min_length=1, max_length=limits.rows)),
        }
        if max_items is not None:
            count = Annotated[int, Field(ge=1, le=max_items)]
            body["k"] = (count, Field(self._top, description="Items a row."))
        self.request = create_model("Request", __config__=_STRICT, **body)
        keys = {f"k{i}": (int | str | None, Field(None, alias=name)) for i, name in enumerate(key_columns)}
        values = {f"o{i}": (kind, Field(alias=name)) for i, (name, kind) in enumerate(outputs.items())}
        answered = create_model("AnswerRow", __config__=_STRICT, **keys, **values)
        self.answer = create_model(
            "Answer",
            __config__=_STRICT,
            model=(
                str | None,
                Field(description="Version of the package that answered; null if two answered rows of it."),
            ),
            models=(
                list[str],
                Field(None, description="Only with two packages: version of the one that answered each row."),
            ),
            rows=(list[answered], Field(description="One row for each row of the request, in its order.")),
        )

    def parse(self, body: bytes | dict[str, Any]) -> Any:
        """Validates a request, as JSON or as an object, and returns an instance of `request`.

        Raises:
            InvalidRequestError: status 400 if the body is not JSON, 422 if it does not fit.
        """
        try:
            if isinstance(body, dict):
                return self.request.model_validate(body)
            return self.request.model_validate_json(body)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            if errors[0]["type"] == "json_invalid":
                failure = Failure(error=f"the body is not valid JSON: {errors[0]['msg']}")
                raise InvalidRequestError(400, failure) from None
            findings = [
                Finding(field=_place(error_entry["loc"]), message=error_entry["msg"])
                for error_entry in errors
            ]
            raise unfit(findings) from None

    def count(self, given: str | None) -> int:
        """Returns the number of items a row that a URL asks for; 0 for a model that scores candidates.

        Raises:
            InvalidRequestError: it is not a number of items that can be recommended.
        """
        if self._max_items is None:
            return 0
        if given is None:
            return self._top
        if not re.fullmatch("[0-9]{1,9}", given) or not 1 <= int(given) <= self._max_items:
            raise refused("k", f"give an integer from 1 to {self._max_items}")
        return int(given)

    def columns(self, rows: list[Any]) -> dict[str, list[Any]]:
        """Returns the columns that the package reads, of validated rows of any requests."""
        columns: dict[str, list[Any]] = {}
        fields = [vars(row) for row in rows]
        for name, required in self.read.items():
            values = [row[self._names[name]] for row in fields]
            if not required and None in values:
                if all(value is None for value in values):
                    continue
                # Another request of the batch gives the times of its candidates.
                values = [
                    self._times(row) if value is None else value
                    for row, value in zip(rows, values, strict=True)
                ]
            columns[name] = values
        return columns

    def _times(self, row: Any) -> list[int]:
        """Returns the request's time for each candidate of a row: the default of the only optional column."""
        candidates = next(name for name in self._names if name.startswith(features.PREFIX[pb.CANDIDATE]))
        return [self.values(row, features.REQUEST_TIME)] * len(self.values(row, candidates))

    def values(self, row: Any, name: str) -> Any:
        """Returns the value of a column of a validated row."""
        return getattr(row, self._names[name])


def _declared(column: FileColumn, limits: RequestLimits) -> tuple[Any, Any]:
    """Returns type and field of a column, for `create_model`."""
    kind: Any = _value(column)
    if column.multi_valued:
        kind = list[kind]
    about = _MEANING.get(column.kind) or (_NUMBERS if Values.REAL in column.values else _IDS)
    default: Any = ...
    if column.side == pb.USER:
        return kind, Field(default, alias=column.name, description=about.capitalize())
    of, most = "candidate", limits.candidates
    if column.side == pb.HISTORY:
        of, most = "event of the history, oldest first", limits.history
    listed: Any = Annotated[list[kind], Field(max_length=most)]
    if not column.required:
        listed, default = listed | None, None
    about = f"{about.capitalize()}; one value for each {of}."
    return listed, Field(default, alias=column.name, description=about)


def _value(column: FileColumn) -> Any:
    """Returns the type of a single value."""
    types: dict[Values, Any] = {Values.ID: _Int64 | str, Values.TEXT: str, Values.INTEGER: _Int64}
    kind = types.get(column.values, float)
    return kind | None if column.nullable else kind


def _place(location: tuple[int | str, ...]) -> str:
    """Formats a place as `rows[3].uih_item_id[2]`, without the branches of unions."""
    place = ""
    for part in location:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part not in ("int", "str", "constrained-int"):
            place += f".{part}" if place else part
    return place


def output_types(pipeline: pb.Pipeline, outputs: list[str], searched: str | None) -> dict[str, Any]:
    """Returns the types of an answer's columns other than key columns, by name.

    Args:
        pipeline: resolved config.
        outputs: the package's tasks.
        searched: the feature whose items are recommended; None for a model that scores candidates.
    """
    if searched is not None:
        return {searched: list[int | str], features.SCORE: list[float]}
    item = features.candidate_item(pipeline)
    items = {item: list[int | str]} if item else {}
    return {**items, **dict.fromkeys(outputs, list[float])}
