"""Reads the codes of items, their semantic ids, from a bundle as `recsys sid` writes it."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.config.declarations import model_of
from recsys.data.arrow import is_text, one_array
from recsys.data.schema.vocabulary import mappings
from recsys.errors import DataError

FORMAT = 1
"""Format of the folder; a reader rejects other formats."""

ABOUT, CODES = "bundle.json", "codes.parquet"
DIGIT = "digit"

ITEM = "item_id"
"""Name of the item feature in every data folder of `recsys prepare`, and of the column of ids of a bundle."""

REMEDY = "use an undamaged copy of the bundle, or make it again with `recsys sid fit`"


@dataclass(frozen=True)
class BundleCodes:
    """Codes of items.

    Attributes:
        ids: item ids, integers or strings.
        codes: int64 [items, levels], each from 0 to `size` - 1.
        digits: int64 [items], 0 to 255; distinguishes items with the same codes.
        size: V, number of values of each code.
    """

    ids: pa.Array
    codes: np.ndarray
    digits: np.ndarray
    size: int


def read_codes(folder: Path) -> BundleCodes:
    """Reads the codes of a bundle and checks the hash of every file.

    Raises:
        DataError: the folder is not a bundle, has another format, or a file is missing, changed or added.
    """
    require_whole(folder, REMEDY, ABOUT)
    try:
        about = json.loads((folder / ABOUT).read_bytes())
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}, this version reads {FORMAT}")
        table = pq.read_table(folder / CODES)
        ids, size = one_array(table[ITEM]), int(about["size"])
        codes = one_array(table["codes"]).flatten().to_numpy().reshape(len(table), -1).astype(np.int64)
        digits = table[DIGIT].to_numpy().astype(np.int64)
        if hash_ids(ids.to_pylist()) != about["ids"]:
            raise ValueError("its ids are not those that bundle.json names")
        if len(codes) and not (codes.min() >= 0 and codes.max() < size and digits.min() >= 0):
            raise ValueError(f"a code is not from 0 to {size - 1}")
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{folder}: damaged ({error}); make it again with `recsys sid fit`") from None
    return BundleCodes(ids, codes, digits, size)


def codes_of_table(pipeline: pb.Pipeline, folder: Path) -> tuple[np.ndarray, tuple[int, ...]]:
    """Reads the codes of every item that a model searches.

    If some items share all their codes, the digit that distinguishes them is the last code.

    Args:
        pipeline: resolved; its model searches items.
        folder: the bundle.

    Returns:
        The codes, int64 [items, levels], whose row k belongs to row k + 1 of the item table, and the number
        of values of each level.

    Raises:
        DataError: the bundle is damaged, its ids have another type, it lacks items of the vocabulary, or it
            gives two items the same codes.
    """
    bundle = read_codes(folder)
    vocabulary = mappings(pipeline)[features.searched_item(pipeline).id.table]
    if len(bundle.ids) and vocabulary.is_text != is_text(bundle.ids.type):
        raise DataError(
            f"{folder}: item ids are {bundle.ids.type}, those of {vocabulary.name} are "
            f"{'texts' if vocabulary.is_text else 'integers'}; make the bundle from the data of this config"
        )
    row = vocabulary.map(bundle.ids)
    place = np.full(vocabulary.rows, -1)
    place[row] = np.arange(len(row))
    place = place[1:]
    if (place < 0).any():
        first = vocabulary.original(np.flatnonzero(place < 0)[:1] + 1)[0].as_py()
        raise DataError(
            f"{folder}: no codes for {(place < 0).sum():,} of {len(place):,} items of {vocabulary.name}, "
            f"such as {first!r}; add them with `recsys sid append`, or make the bundle from the data of this "
            "config with `recsys sid embed` and `recsys sid fit`"
        )
    codes, digits = bundle.codes[place], bundle.digits[place]
    sizes = [bundle.size] * codes.shape[1]
    if digits.any():
        codes, sizes = np.column_stack([codes, digits]), [*sizes, int(digits.max()) + 1]
    if len(np.unique(codes, axis=0)) < len(codes):
        raise DataError(f"{folder}: two items have the same codes; make it again with `recsys sid fit`")
    return codes, tuple(sizes)


def listed_items(pipeline: pb.Pipeline, path: str) -> np.ndarray:
    """Reads which items a model may recommend, bool [items] for rows 1 on of the item table.

    Args:
        pipeline: resolved; its model searches items.
        path: parquet file with a column of item ids that is named like the item feature. Ids that are not
            in the vocabulary are ignored.

    Raises:
        DataError: the file cannot be read, has no such column, or no item of the vocabulary.
    """
    feature = features.searched_item(pipeline)
    vocabulary = mappings(pipeline)[feature.id.table]
    field = f"{model_of(pipeline).path}.decoding.items"
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file; correct {field}, or leave it out to search all items"
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as parquet ({error}); {field} names it") from None
    if feature.name not in table.column_names:
        raise DataError(f"{path}: no column {feature.name!r}; it has {', '.join(table.column_names)}")
    ids = one_array(table[feature.name]).drop_null()
    if len(ids) and vocabulary.is_text != is_text(ids.type):
        kind = "texts" if vocabulary.is_text else "integers"
        raise DataError(f"{path}: {feature.name} is {ids.type}, the ids of {vocabulary.name} are {kind}")
    is_listed = np.zeros(vocabulary.rows, bool)
    is_listed[vocabulary.map(ids)] = True
    if not is_listed[1:].any():
        raise DataError(f"{path}: none of its {len(ids):,} ids is in {vocabulary.name}")
    return is_listed[1:]


def fingerprint(pipeline: pb.Pipeline) -> str | None:
    """Returns a SHA-256 over the codes of all items in the order of the table; None without codes.

    A bundle with more items has the same fingerprint, because the codes of older items do not change.

    Raises:
        DataError: as for `codes_of_table`.
    """
    bundle = model_of(pipeline).code_bundle
    if not bundle:
        return None
    codes, sizes = codes_of_table(pipeline, Path(bundle))
    return hashlib.sha256(repr((codes.shape, sizes)).encode() + codes.tobytes()).hexdigest()


def require_whole(folder: Path, remedy: str, needed: str) -> None:
    """Checks a folder against its manifest.

    Raises:
        DataError: a file is missing, differs, or was added.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; check the path, or {remedy}")
    faults = files.manifest_faults(folder)
    faults += [f"{path}: not in the manifest" for path in files.not_in_manifest(folder) if not faults]
    if not faults and not (folder / needed).is_file():
        faults = [f"{folder / needed}: missing"]
    if faults:
        raise DataError("\n".join([*faults, remedy]))


def hash_ids(ids: Iterable[int | str]) -> str:
    """Returns a SHA-256 over ids in their order."""
    return hashlib.sha256("\n".join(map(repr, ids)).encode()).hexdigest()
