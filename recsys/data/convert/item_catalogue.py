"""Features of the items that a model searches, by row of the item table, read from `data.item_file`.

The collator takes from it what the item encoder wants of a batch's negatives; a package converts new items
the same way.
"""

from collections.abc import Mapping
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.data.arrow import first_line, one_array, open_parquet
from recsys.data.convert.block import Flat, pick
from recsys.data.convert.converter import cells_of, to_flat
from recsys.data.convert.row_checks import Findings, check_nulls, check_values
from recsys.data.schema.contract import Field, Kind, check_fields
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.errors import DataError

_REMEDY = "The preparation tools write items.parquet, a row for each item of the catalogue."
_COUNT_REMEDY = (
    "Negatives are drawn or weighed by how often an item occurs in training: the preparation tools write it. "
    "Or choose uniform negatives, or in_batch { log_q: false }."
)


class Catalogue:
    """Features of all items.

    Args:
        pipeline: resolved, with a model that searches items.

    Raises:
        DataError: a file that is missing, broken, or lacks a column or an item.
    """

    def __init__(self, pipeline: pb.Pipeline) -> None:
        self.columns = features.columns(pipeline, pb.ITEM)
        self._flat: dict[str, Flat] = {}
        if not self.columns:
            return
        path, known = pipeline.data.item_file, mappings(pipeline)
        item = features.searched_item(pipeline)
        table = _read(path, [item.name, *(column.feature.name for column in self.columns)])
        rows = _rows_of(table, item, known[item.id.table], path)
        of_file = convert(pipeline, table, known, path)
        # Row 0 of the item table stands for unknown items, of which nothing is known; no batch asks for it.
        place = np.zeros(len(known[item.id.table]) + 1, np.int64)
        place[rows] = np.arange(len(rows))
        self._flat = {name: pick(column, place) for name, column in of_file.items()}

    def take(self, rows: np.ndarray) -> dict[str, Flat]:
        """By batch column what is known of some items, given as rows >= 1 of the item table."""
        return {name: pick(column, rows) for name, column in self._flat.items()}


def fingerprint(pipeline: pb.Pipeline) -> str | None:
    """SHA-256 of the file that describes the items; None of a model that reads none.

    Raises:
        DataError: it cannot be read.
    """
    path = pipeline.data.item_file
    if not features.columns(pipeline, pb.ITEM):
        return None
    try:
        with fsspec.open(path, "rb") as file:
            return files.sha256(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)}). {_REMEDY}") from error


def convert(pipeline: pb.Pipeline, table: pa.Table, known: Mapping[str, Any], path: str) -> dict[str, Flat]:
    """By batch column the features of side ITEM of some items, in the order of the table.

    Args:
        pipeline: resolved.
        table: a column under the name of each such feature.
        known: `mappings` of the pipeline.
        path: what errors call the table.

    Raises:
        DataError: a column that is missing or of a wrong type, or a value that breaks the contract of rows.
    """
    columns = features.columns(pipeline, pb.ITEM)
    fields = [_field(column) for column in columns]
    check_fields(table.schema, fields, path)
    findings, found = Findings(len(table)), {}
    for column, field in zip(columns, fields, strict=True):
        cells = cells_of(table, field)
        check_nulls(findings, cells, one_array(table[field.column]))
        check_values(findings, cells)
        found[column.name] = cells, column.table
    findings.raise_first(path, 0, skippable=False)
    flat = {name: to_flat(cells, known.get(table_name)) for name, (cells, table_name) in found.items()}
    return {name: Flat(pb.ITEM, _tensor_type(one.values), one.offsets) for name, one in flat.items()}


def _tensor_type(values: np.ndarray) -> np.ndarray:
    # Tensors of integers are int64.
    return values.astype(np.int64, copy=False) if values.dtype == np.int32 else values


def occurrences(vocabulary: Vocabulary, path: str) -> np.ndarray:
    """float64 [rows]: how often each id of a vocabulary occurs in training, by row of its table; 0 for row 0.

    Raises:
        DataError: the file has no column `count`.
    """
    counts = _read(path, ["count"], "the item's vocabulary", _COUNT_REMEDY)["count"].to_numpy()
    found = np.zeros(vocabulary.rows)
    found[vocabulary.order.rows(np.arange(len(counts)))] = counts
    return found


def _field(column: features.Column) -> Field:
    kind = Kind.ID if column.feature.HasField("id") else Kind.NUMBER
    # A value an item, as USER columns have a value a row.
    name, multi_valued = column.feature.name, column.multi_valued
    return Field(name, pb.USER, kind, multi_valued=multi_valued, feature=column.feature)


def _read(path: str, wanted: list[str], what: str = "data.item_file", remedy: str = _REMEDY) -> pa.Table:
    try:
        with open_parquet(path, remedy) as file:
            there = [name for name in wanted if name in file.schema_arrow.names]
            if there != wanted:
                missing = ", ".join(name for name in wanted if name not in there)
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path}: no column {missing}; it has {names}. {remedy}")
            return file.read(columns=wanted)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file ({what}). {remedy}") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)}). {remedy}") from error


def item_ids(table: pa.Table, item: pb.Feature, path: str = "items") -> pa.Array:
    """Original ids of the items of a table.

    Args:
        table: with a column under the name of the feature.
        item: the feature that the items are.
        path: what errors call the table.

    Raises:
        DataError: no such column, one of another type, or nulls in it.
    """
    check_fields(table.schema, [Field(item.name, pb.USER, Kind.ID, feature=item)], path)
    ids = one_array(table[item.name])
    if ids.null_count:
        row = pc.index(ids.is_null(), True).as_py()
        what = f"{item.name} is null, {ids.null_count} in all; each row is an item"
        raise DataError(f"{path}, row {row}: {what}. {_REMEDY}")
    return ids


def _rows_of(table: pa.Table, item: pb.Feature, vocabulary: Vocabulary, path: str) -> np.ndarray:
    """Rows of the item table that the rows of the file are about; 0 for items that are not in the catalogue.

    Raises:
        DataError: an item of the catalogue is not there, or twice.
    """
    rows = vocabulary.map(item_ids(table, item, path))
    times = np.bincount(rows, minlength=vocabulary.rows)[1:]
    for places, what in ((np.flatnonzero(times > 1), "twice"), (np.flatnonzero(times == 0), "missing")):
        if len(places):
            first = vocabulary.original(places[:1] + 1)[0].as_py()
            raise DataError(
                f"{path}: {len(places)} of the {len(vocabulary)} items of {vocabulary.name} are {what}, the "
                f"first is {first!r}. Each has one row; what is not known of one is an empty list or text."
            )
    return rows
