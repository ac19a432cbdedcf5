"""Hashes the key columns of rows, to find repeated rows and to group rows."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.arrow import integers, one_array
from recsys.data.hashing import combine, hash_text


def hash_keys(keys: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Hashes each row of a table of key columns.

    Returns:
        The hashes, uint64 [rows], and the numbers of the rows without a null, int64 [n]. Rows with a null are
        reported elsewhere.
    """
    columns = [one_array(column) for column in keys.columns]
    is_complete = np.ones(len(keys), bool)
    for column in columns:
        if column.null_count:
            is_complete &= column.is_valid().to_numpy(zero_copy_only=False)
    return combine(*(key_hash(column) for column in columns)), np.flatnonzero(is_complete)


def key_hash(values: pa.Array) -> np.ndarray:
    """Maps values of a key column to int64: integers stay, all other values become a hash of their text."""
    if pa.types.is_integer(values.type):
        return integers(values)
    return hash_text(pc.fill_null(values.cast(pa.large_string()), "")).view(np.int64)


def same_key(key: dict[str, Any]) -> str:
    """Describes the key of a repeated row: `has the same user_id = 3 and request_time = 1030`."""
    return "has the same " + " and ".join(f"{name} = {value!r}" for name, value in key.items())
