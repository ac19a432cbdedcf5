"""Small things that every reader of arrow data needs."""

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.errors import DataError


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, dictionaries decoded."""
    array = (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.array([], column.type)])
    )
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def is_text(given: pa.DataType) -> bool:
    """Whether values are strings."""
    return pa.types.is_string(given) or pa.types.is_large_string(given)


def open_parquet(path: str, remedy: str) -> pq.ParquetFile:
    """A parquet file whose pages are checked against their checksums as they are read.

    Args:
        path: local path or fsspec address.
        remedy: sentence that ends the error about a file that is broken.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it is not a complete parquet file.
    """
    try:
        source = fsspec.open(path, "rb").open() if "://" in path else path
        return pq.ParquetFile(source, page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a complete parquet file ({first_line(error)}). {remedy}") from error


def first_line(error: Exception) -> str:
    """What an error says, without the details below."""
    return str(error).split("\n", 1)[0]
