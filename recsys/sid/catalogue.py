"""Reads the inputs of semantic ids: item ids, item texts and the training events of a data folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from recsys import typed_json
from recsys.data.codes import ITEM
from recsys.errors import ConfigError, DataError


@dataclass(frozen=True)
class Histories:
    """Training histories as flat arrays.

    Attributes:
        items: int64 [U], rows of the catalogue, each history's oldest event first; -1 for an item outside it.
        rows: int64 [U], the history of each event.
    """

    items: np.ndarray
    rows: np.ndarray


def read_ids(data: Path) -> pl.Series:
    """Reads the ids of all items of a data folder, sorted, so that their order does not depend on events.

    Raises:
        DataError: the folder has no vocabulary of items.
    """
    path = data / "vocabulary" / f"{ITEM}.parquet"
    ids = _read_table(path, f"{data} was not made by `recsys prepare`; name a folder that was").get_column(
        "id"
    )
    if ids.n_unique() != len(ids) or ids.null_count():
        raise DataError(f"{path}: an id is missing or occurs twice; prepare the data again")
    return ids.sort().alias(ITEM)


def read_training_histories(data: Path, ids: pl.Series) -> Histories:
    """Reads the histories of the training rows; no other file of the folder is opened.

    Args:
        data: a folder of `recsys prepare` with one training row per user (--task retrieval).
        ids: as `read_ids` returns them.

    Raises:
        ConfigError: the folder holds rows for ranking, whose histories overlap.
        DataError: files are missing or damaged, or have no histories of items.
    """
    schema = data / "schema.json"
    try:
        task = typed_json.parse(schema.read_bytes(), dict).get("task")
    except FileNotFoundError:
        raise DataError(f"{schema}: no such file; name a folder that `recsys prepare` made") from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{schema}: damaged ({error}); prepare the data again") from None
    if task != "retrieval":
        raise ConfigError(
            f"{data}: prepared for {task}, where a user has many rows whose histories overlap; co-occurrence "
            "needs `recsys prepare` with --task retrieval. Or take --source text"
        )
    column = f"uih_{ITEM}"
    folder = data / "train"
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else [data / "train.parquet"]
    if not paths:
        raise DataError(f"{folder}: no parquet file in it; prepare the data again")
    lists = [_column(path, column) for path in paths]
    histories = pl.concat(lists) if lists else pl.Series(column, [], pl.List(ids.dtype))
    frame = pl.DataFrame({"item": histories}).with_row_index("row").explode("item").drop_nulls("item")
    rows_of_ids = pl.DataFrame({"item": ids}).with_row_index("place")
    if frame["item"].dtype != ids.dtype:
        raise DataError(
            f"{paths[0]}: {column} holds {frame['item'].dtype}, the vocabulary {ids.dtype}; prepare the data "
            "again"
        )
    joined = frame.join(rows_of_ids, on="item", how="left", maintain_order="left")
    places = joined["place"].cast(pl.Int64).fill_null(-1).to_numpy()
    return Histories(places, joined["row"].cast(pl.Int64).to_numpy())


def read_texts(
    data: Path, ids: pl.Series, table: Path | None, id_column: str, columns: Sequence[str]
) -> list[str]:
    """Reads a text for each item, "" where nothing is known: "title. categories. terms".

    Args:
        data: a folder of `recsys prepare`; its names.parquet (titles) and items.parquet (features) are read.
        ids: as `read_ids` returns them.
        table: another item table instead of these two: .parquet, .csv or .jsonl.
        id_column: name of the column of ids in `table`.
        columns: text columns, in the order of the text; empty: all columns but the ids.

    Raises:
        ConfigError: there is no item table, or it has no such column.
        DataError: the table is damaged, or names an item twice.
    """
    if table is not None:
        return _texts(_read_table(table, "name an item table in --items"), table, id_column, ids, columns)
    names, items = data / "names.parquet", data / "items.parquet"
    tables: list[pl.DataFrame] = []
    if names.is_file():
        tables.append(
            _read_table(names, "prepare the data again").rename({"id": ITEM, "name": "title"}, strict=False)
        )
    if items.is_file():
        tables.append(_read_table(items, "prepare the data again"))
    if not tables:
        raise ConfigError(
            f"{data}: neither names.parquet nor items.parquet is in it, so items have no text; name an item "
            "table with --items FILE --item-column NAME, or take --source cooc"
        )
    joined = pl.DataFrame({ITEM: ids})
    for frame in tables:
        joined = joined.join(frame, on=ITEM, how="left", maintain_order="left")
    return _texts(joined, data, ITEM, ids, columns)


def _texts(
    frame: pl.DataFrame, path: Path, id_column: str, ids: pl.Series, columns: Sequence[str]
) -> list[str]:
    absent = [name for name in (id_column, *columns) if name not in frame.columns]
    if absent:
        raise ConfigError(f"{path}: no column {absent[0]!r}; it has {', '.join(frame.columns)}")
    frame = frame.with_columns(_cast_ids(frame[id_column], ids.dtype, path))
    if frame[id_column].n_unique() != len(frame):
        twice = frame.filter(pl.col(id_column).is_duplicated())[id_column][0]
        raise DataError(f"{path}: item {twice!r} occurs twice; keep one row per item")
    wanted = list(columns) or [name for name in frame.columns if name != id_column]
    joined = pl.DataFrame({id_column: ids}).join(frame, on=id_column, how="left", maintain_order="left")
    rows = joined.select(wanted).iter_rows()
    return [". ".join(words for value in row if (words := _words(value))) for row in rows]


def _cast_ids(values: pl.Series, kind: pl.DataType, path: Path) -> pl.Series:
    """Casts the ids of a table to the type of the data's ids.

    Raises:
        ConfigError: the data has integers, and the table has another type.
        DataError: an id is missing.
    """
    if values.null_count():
        raise DataError(
            f"{path}: row {values.is_null().arg_max()} has no {values.name!r}; every row needs an id"
        )
    if kind == pl.String:
        return values.cast(pl.String)
    if not values.dtype.is_integer():
        raise ConfigError(
            f"{path}: column {values.name!r} holds {values.dtype}, the item ids of the data are integers; "
            "name another column in --item-column"
        )
    return values.cast(kind)


def _words(value: object) -> str:
    """Writes a cell as text; nested lists, such as paths of categories, are flattened."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(words for element in value if (words := _words(element)))
    return str(value).strip()


def read_vectors(path: Path, ids: pl.Series, id_column: str) -> np.ndarray:
    """Reads vectors made elsewhere, float64 [items, D]; a row of zeros for an item that the file leaves out.

    Args:
        path: a .parquet file with a column of ids and a column of lists of numbers, or an .npy file with a
            row for each id of the sorted catalogue.
        ids: as `read_ids` returns them.
        id_column: name of the column of ids.

    Raises:
        DataError: the file is missing or damaged, has other rows, or a value that is not finite.
    """
    if path.suffix == ".npy":
        try:
            vectors = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read ({error}); write it with numpy.save") from None
        if vectors.ndim != 2 or len(vectors) != len(ids):
            raise DataError(
                f"{path}: an array of shape {vectors.shape}; expected a row for each of the {len(ids):,} "
                "items of the data in the order of their ids"
            )
        return _finite(vectors, path)
    frame = _read_table(path, "name a parquet or npy file")
    lists = [name for name, kind in frame.schema.items() if isinstance(kind, (pl.List, pl.Array))]
    if id_column not in frame.columns or len(lists) != 1:
        raise DataError(
            f"{path}: expected a column {id_column!r} and one column of lists, found {frame.columns}"
        )
    column = frame[lists[0]]
    sizes = column.list.len() if isinstance(column.dtype, pl.List) else column.arr.len()
    if column.null_count() or sizes.n_unique() != 1:
        raise DataError(
            f"{path}: the lists of {lists[0]!r} differ in length; every item needs the same number of values"
        )
    vectors = _finite(np.array(column.to_list()), path)
    key = _cast_ids(frame[id_column], ids.dtype, path)
    place = pl.DataFrame({"id": ids}).join(
        pl.DataFrame({"id": key}).with_row_index("row"), on="id", how="left", maintain_order="left"
    )
    if len(place) != len(ids):
        raise DataError(f"{path}: an item occurs twice; keep one row per item")
    rows = place["row"].cast(pl.Int64).fill_null(-1).to_numpy()
    return np.where((rows >= 0)[:, None], vectors[rows], 0.0)


def _finite(vectors: np.ndarray, path: Path) -> np.ndarray:
    if vectors.dtype.kind not in "fiu":
        raise DataError(f"{path}: holds {vectors.dtype}, expected numbers")
    vectors = vectors.astype(np.float64)
    if not np.isfinite(vectors).all():
        row = int(np.flatnonzero(~np.isfinite(vectors).all(1))[0])
        raise DataError(f"{path}: row {row} has a value that is not finite")
    return vectors


def _column(path: Path, name: str) -> pl.Series:
    frame = _read_table(path, "prepare the data again")
    if name not in frame.columns:
        raise DataError(f"{path}: no column {name}; it has {', '.join(frame.columns)}")
    return frame[name]


def _read_table(path: Path, remedy: str) -> pl.DataFrame:
    readers = {".parquet": pl.read_parquet, ".csv": pl.read_csv, ".jsonl": pl.read_ndjson}
    if path.suffix not in readers:
        raise ConfigError(f"{path}: expected a file that ends in {', '.join(readers)}")
    try:
        return readers[path.suffix](path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {remedy}") from None
    except (OSError, pl.exceptions.PolarsError, pa.ArrowException) as error:
        first = str(error).split("\n", 1)[0]
        raise DataError(f"{path}: cannot be read ({first}); {remedy}") from None
