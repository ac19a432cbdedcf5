"""Small helpers for arrow data: whole columns, types, integers, parquet files."""

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.errors import DataError

_FLOATS = (pa.float32(), pa.float64())


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Joins the chunks of a column into one array and decodes dictionaries."""
    array = (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a type is one of the two string types, string and large_string."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Returns whether a type is one of the types of lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values within any lists."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def integers(values: pa.Array) -> np.ndarray:
    """Converts an integer array to int64; nulls become 0."""
    if values.null_count:
        values = pc.fill_null(values, pa.scalar(0, values.type))
    return values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)


def floats(values: pa.Array) -> np.ndarray:
    """Converts a number or boolean array to float64, unless it is float32; nulls become NaN."""
    if values.type not in _FLOATS:
        values = values.cast(pa.float64(), safe=False)
    return values.to_numpy(zero_copy_only=False)


def open_parquet(path: str, remedy: str) -> pq.ParquetFile:
    """Opens a parquet file; its pages are checked against their checksums as they are read.

    Args:
        path: local path or fsspec address.
        remedy: the last sentence of the error about a broken file.

    Raises:
        FileNotFoundError: the file does not exist.
        DataError: the file is not a complete parquet file.
    """
    try:
        source = fsspec.open(path, "rb").open() if "://" in path else path
        return pq.ParquetFile(source, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a complete parquet file ({first_line(error)}). {remedy}") from error


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without the details below it."""
    return str(error).split("\n", 1)[0]
