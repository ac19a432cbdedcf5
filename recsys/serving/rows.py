"""The rows of a request, as they came: pydantic models of JSON, or columns of an Arrow stream."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from recsys.serving.schema import RequestSchema


class JsonRows:
    """Rows that came as JSON.

    Args:
        schema: the schema of requests.
        models: validated rows, as pydantic models.
    """

    columns = None

    def __init__(self, schema: RequestSchema, models: Sequence[Any]) -> None:
        self._schema, self.models = schema, models

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.models)

    def take(self, places: list[int]) -> "JsonRows":
        """Returns the rows at these places."""
        return JsonRows(self._schema, [self.models[place] for place in places])

    def values(self, name: str) -> list[Any]:
        """Returns the values of a column; None for rows without it."""
        return [self._schema.values(model, name) for model in self.models]


class ArrowRows:
    """Rows that came as an Arrow stream.

    Args:
        columns: checked columns.
    """

    models = ()

    def __init__(self, columns: pa.RecordBatch) -> None:
        self.columns = columns

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self.columns.num_rows

    def take(self, places: list[int]) -> "ArrowRows":
        """Returns the rows at these places."""
        return ArrowRows(self.columns.take(pa.array(places)))

    def values(self, name: str) -> list[Any]:
        """Returns the values of a column; None for rows without it."""
        if name not in self.columns.schema.names:
            return [None] * len(self)
        return self.columns.column(name).to_pylist()


Rows = JsonRows | ArrowRows
"""Rows of a request. Either `models` is empty, or `columns` is None."""
