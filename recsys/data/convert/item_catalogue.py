"""Reads the features of the items that a model searches from `data.item_file`, by row of the item table.

The collator looks up the features of a batch's negatives here, for the item encoder. A package converts new
items with the same functions.
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
from recsys.data.convert.column_block import FlatColumn, pick
from recsys.data.convert.converter import cells_of, convert_feature
from recsys.data.convert.row_checks import RowFindings, check_nulls, check_values
from recsys.data.schema.contract import check_columns, feature_columns
from recsys.data.schema.vocabulary import Vocabulary, mappings
from recsys.errors import DataError

_REMEDY = "The preparation tools write items.parquet, a row for each item of the catalogue."
_COUNT_REMEDY = (
    "Negatives are drawn or weighted by how often an item occurs in training: the preparation tools write "
    "it. Or choose uniform negatives, or in_batch { log_q: false }."
)


class ItemCatalogue:
    """The features of all items.

    Args:
        columns: the values of each feature in the order of the item table's rows, by batch column.
    """

    def __init__(self, columns: dict[str, FlatColumn]) -> None:
        self._columns = columns

    @classmethod
    def open(cls, pipeline: pb.Pipeline) -> "ItemCatalogue":
        """Reads `data.item_file` of a resolved pipeline whose model searches items and has features of them.

        Raises:
            DataError: the file is missing, broken, or lacks a column or an item.
        """
        path, table_mappings = pipeline.data.item_file, mappings(pipeline)
        item = features.searched_item(pipeline)
        item_columns = [
            name for column in features.columns(pipeline, pb.ITEM) for name in column.kind.columns(pb.ITEM)
        ]
        table = _read(path, list(dict.fromkeys([item.name, *item_columns])))
        vocabulary = table_mappings[item.id.table]
        rows = _rows_of(table, item, vocabulary, path)
        columns = convert(pipeline, table, table_mappings, path)
        # Row 0 of the item table stands for unknown items, which have no features; no batch looks it up.
        place = np.zeros(len(vocabulary) + 1, np.int64)
        place[rows] = np.arange(len(rows))
        return cls({name: pick(column, place) for name, column in columns.items()})

    def take(self, rows: np.ndarray) -> dict[str, FlatColumn]:
        """Returns the features of items, by batch column; `rows` >= 1 are rows of the item table."""
        return {name: pick(column, rows) for name, column in self._columns.items()}


def fingerprint(pipeline: pb.Pipeline) -> str | None:
    """Returns the SHA-256 of the item file, or None if the model reads no item file.

    Raises:
        DataError: the file cannot be read.
    """
    path = pipeline.data.item_file
    if not features.columns(pipeline, pb.ITEM):
        return None
    try:
        with fsspec.open(path, "rb") as file:
            return files.sha256(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)}). {_REMEDY}") from error


def convert(
    pipeline: pb.Pipeline, table: pa.Table, table_mappings: Mapping[str, Any], path: str
) -> dict[str, FlatColumn]:
    """Converts the features of side ITEM of a table of items, in the order of its rows, by batch column.

    Args:
        pipeline: resolved.
        table: a row for each item, with a column under the name of each such feature.
        table_mappings: the mapping of each embedding table, as `vocabulary.mappings` reads them.
        path: name of the table in errors.

    Raises:
        DataError: a column is missing or has a wrong type, or a value breaks the contract of rows.
    """
    columns = features.columns(pipeline, pb.ITEM)
    in_file = [read for column in columns for read in feature_columns(column.kind, pb.ITEM)]
    check_columns(table.schema, in_file, path)
    findings = RowFindings(len(table))
    cells = {column.name: cells_of(one_array(table[column.name]), column) for column in in_file}
    for values in cells.values():
        check_nulls(findings, values, one_array(table[values.column.name]))
        check_values(findings, values)
    findings.raise_first(path, 0, skippable=False)
    converted = {}
    for column in columns:
        parts = [cells[name] for name in column.kind.columns(pb.ITEM)]
        flat = convert_feature(column, parts, table_mappings.get(column.table))
        converted[column.name] = FlatColumn(pb.ITEM, _tensor_type(flat.values), flat.offsets)
    return converted


def _tensor_type(values: np.ndarray) -> np.ndarray:
    # Tensors of integers are int64.
    return values.astype(np.int64, copy=False) if values.dtype == np.int32 else values


def occurrences(vocabulary: Vocabulary, path: str) -> np.ndarray:
    """Reads the training occurrences of each id of a vocabulary, float64 [rows of its table], 0 for row 0.

    Raises:
        DataError: the file has no column `count`.
    """
    counts = _read(path, ["count"], "the item's vocabulary", _COUNT_REMEDY)["count"].to_numpy()
    by_row = np.zeros(vocabulary.rows)
    by_row[vocabulary.layout.row_of(np.arange(len(counts)))] = counts
    return by_row


def _read(path: str, wanted: list[str], setting: str = "data.item_file", remedy: str = _REMEDY) -> pa.Table:
    try:
        with open_parquet(path, remedy) as file:
            missing = ", ".join(name for name in wanted if name not in file.schema_arrow.names)
            if missing:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path}: no column {missing}; it has {names}. {remedy}")
            return file.read(columns=wanted)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file ({setting}). {remedy}") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read ({first_line(error)}). {remedy}") from error


def item_ids(table: pa.Table, item: pb.Feature, path: str = "items") -> pa.Array:
    """Returns the original ids of the items of a table.

    Args:
        table: a row for each item, with a column under the name of the feature.
        item: the feature that identifies items.
        path: name of the table in errors.

    Raises:
        DataError: the column is missing, has a wrong type, or has nulls.
    """
    check_columns(table.schema, feature_columns(features.kind_of(item), pb.ITEM), path)
    ids = one_array(table[item.name])
    if ids.null_count:
        row = pc.index(ids.is_null(), True).as_py()
        problem = f"{item.name} is null, {ids.null_count} in all; each row is an item"
        raise DataError(f"{path}, row {row}: {problem}. {_REMEDY}")
    return ids


def _rows_of(table: pa.Table, item: pb.Feature, vocabulary: Vocabulary, path: str) -> np.ndarray:
    """Returns the row of the item table of each row of the file, 0 for items that are not in the catalogue.

    Raises:
        DataError: an item of the catalogue is missing or occurs twice.
    """
    rows = vocabulary.map(item_ids(table, item, path))
    times = np.bincount(rows, minlength=vocabulary.rows)[1:]
    for places, fault in (
        (np.flatnonzero(times > 1), "occur twice"),
        (np.flatnonzero(times == 0), "are missing"),
    ):
        if len(places):
            first = vocabulary.original(places[:1] + 1)[0].as_py()
            raise DataError(
                f"{path}: {len(places)} of the {len(vocabulary)} items of {vocabulary.name} {fault}, the "
                f"first is {first!r}. Each item needs one row; write unknown features as an empty list or "
                "text."
            )
    return rows
