"""Writes the part of a bundle of semantic ids that models read, with codes that a test chooses."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys import files
from recsys.data.codes import ABOUT, CODES, DIGIT, FORMAT, ITEM, hash_ids


def write_codes(folder: Path, ids: list, codes: np.ndarray, size: int) -> Path:
    """Writes codes [items, levels]; the digit counts the items of a code."""
    seen: dict[tuple, int] = {}
    digits = []
    for code in map(tuple, codes.tolist()):
        digits.append(seen.get(code, 0))
        seen[code] = digits[-1] + 1
    folder.mkdir(parents=True)
    columns = {ITEM: pa.array(ids), "codes": pa.array(codes.tolist()), DIGIT: pa.array(digits, pa.int32())}
    pq.write_table(pa.table(columns), folder / CODES)
    (folder / ABOUT).write_text(json.dumps({"format": FORMAT, "size": size, "ids": hash_ids(ids)}))
    files.write_manifest(folder)
    return folder


def movielens_codes(folder: Path, seed: int = 0, size: int = 8) -> Path:
    """Random codes for the bundled movies, so few that some movies share them."""
    ids = pq.read_table("tests/data/movielens/vocabulary/item_id.parquet")["id"].to_pylist()
    codes = np.random.default_rng(seed).integers(0, size, (len(ids), 3))
    return write_codes(folder, ids, codes, size)
