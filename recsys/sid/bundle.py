"""A bundle of semantic ids: a folder that training, export and prediction read, whole or not at all.

    manifest.json           hashes of the other files
    bundle.json             version, settings, hashes of ids and transform, report numbers
    codes.parquet           item_id, codes (a list of whole numbers), digit (tells items of one code apart)
    quantizer.safetensors   centroids [levels, V, d] and further tensors of the quantizer
    transform/              the transform from items to vectors, as in a folder of `recsys sid embed`

Codes of an item never change. Appending items makes a bundle of the next version.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recsys import files, typed_json
from recsys.data.codes import ABOUT, CODES, FORMAT, ITEM, hash_ids, read_codes
from recsys.errors import ConfigError, DataError
from recsys.sid.collisions import extra_digits, free_digits, spread_unknown
from recsys.sid.embeddings import TRANSFORM, Embeddings, hash_transform
from recsys.sid.quantizers import QUANTIZERS, Fitted, Quantizer
from recsys.sid.statistics import CodeStatistics, Kept, code_statistics, kept

_QUANTIZER = "quantizer.safetensors"


@dataclass(frozen=True)
class About:
    """The contents of `bundle.json`.

    Attributes:
        format: format of the folder; a reader rejects formats other than `FORMAT`.
        version: 1, plus 1 for each time that items were appended.
        quantizer: one of `QUANTIZERS`.
        ordered: whether each code refines the one before it; False for opq.
        size: V, number of values of each code.
        ids: SHA-256 of the item ids in the order of codes.parquet.
        transform: SHA-256 of the transform.
        settings: settings of the quantizer.
        codes: statistics of the codes of this version.
        kept: measures of how much of the vectors the codes of version 1 keep.
    """

    format: int
    version: int
    quantizer: str
    ordered: bool
    size: int
    ids: str
    transform: str
    settings: dict[str, Any]
    codes: CodeStatistics
    kept: Kept


@dataclass(frozen=True)
class Bundle:
    """Codes of items with the frozen quantizer.

    Attributes:
        about: settings and statistics.
        ids: item ids: the sorted ids of version 1, then the sorted ids of each later version.
        codes: int64 [items, levels].
        digits: int64 [items], 0 to 255.
        quantizer: encodes vectors of new items.
    """

    about: About
    ids: pl.Series
    codes: np.ndarray
    digits: np.ndarray
    quantizer: Quantizer


def make_bundle(
    embeddings: Embeddings, fitted: Fitted, quantizer: str, transform: str, settings: dict
) -> Bundle:
    """Makes version 1 of a bundle.

    Args:
        embeddings: vectors that the quantizer was fitted on.
        fitted: quantizer and codes.
        quantizer: name of the quantizer.
        transform: hash of the transform of `embeddings`.
        settings: settings of the quantizer, including `size`.

    Raises:
        ConfigError: more items share a code than the extra digit tells apart.
    """
    ordered, size = quantizer != "opq", int(settings["size"])
    codes = spread_unknown(fitted.codes.numpy(), embeddings.vectors, size)
    digits = extra_digits(codes)
    about = About(
        format=FORMAT,
        version=1,
        quantizer=quantizer,
        ordered=ordered,
        size=size,
        ids=hash_ids(embeddings.ids),
        transform=transform,
        settings=settings,
        codes=code_statistics(codes, digits, size),
        kept=kept(torch.from_numpy(embeddings.vectors), fitted.codes, fitted.quantizer, ordered=ordered),
    )
    return Bundle(about, embeddings.ids, codes, digits, fitted.quantizer)


def append_items(bundle: Bundle, embeddings: Embeddings, transform: str) -> Bundle:
    """Adds the items that a bundle does not have yet; the codes of its items do not change.

    Args:
        bundle: any version.
        embeddings: vectors of new items; items that the bundle has are skipped.
        transform: hash of the transform of `embeddings`.

    Raises:
        ConfigError: the vectors were made by another transform, or a code is full.
        DataError: ids of another type, or no item is new.
    """
    if transform != bundle.about.transform:
        raise ConfigError(
            "the vectors come from another transform than those of the bundle, so their numbers mean "
            "something else; make them with `recsys sid embed --like BUNDLE`"
        )
    if embeddings.ids.dtype != bundle.ids.dtype:
        raise DataError(f"item ids are {embeddings.ids.dtype}, those of the bundle {bundle.ids.dtype}")
    rows = np.flatnonzero(~embeddings.ids.is_in(bundle.ids.implode()).to_numpy())
    if not len(rows):
        raise DataError("no item is new: the bundle has codes for all of them")
    vectors = embeddings.vectors[rows]
    codes = bundle.quantizer.encode(torch.from_numpy(vectors)).numpy()
    codes = spread_unknown(codes, vectors, bundle.about.size, first=len(bundle.ids))
    digits = free_digits(codes, bundle.codes, bundle.digits)
    ids = pl.concat([bundle.ids, embeddings.ids[rows]])
    all_codes, all_digits = np.concatenate([bundle.codes, codes]), np.concatenate([bundle.digits, digits])
    about = replace(
        bundle.about,
        version=bundle.about.version + 1,
        ids=hash_ids(ids),
        codes=code_statistics(all_codes, all_digits, bundle.about.size),
    )
    return Bundle(about, ids, all_codes, all_digits, bundle.quantizer)


def write_bundle(folder: Path, bundle: Bundle, transform: Path) -> None:
    """Writes a bundle atomically: after an error, there is either no folder or the old one.

    Args:
        folder: folder to create or replace.
        bundle: the bundle.
        transform: a folder of vectors or a bundle, whose transform is copied.
    """
    with files.whole_folder(folder) as aside:
        flat = pa.array(bundle.codes.astype(np.int32).reshape(-1))
        ids = bundle.ids.to_arrow()
        table = pa.table(
            {
                ITEM: ids.cast(pa.string()) if bundle.ids.dtype == pl.String else ids,
                "codes": pa.FixedSizeListArray.from_arrays(flat, bundle.codes.shape[1]),
                "digit": pa.array(bundle.digits.astype(np.int32)),
            }
        )
        pq.write_table(table, aside / CODES, compression="zstd", write_page_checksum=True)
        tensors = {name: tensor.contiguous() for name, tensor in bundle.quantizer.tensors().items()}
        save_file(tensors, aside / _QUANTIZER)
        shutil.copytree(transform / TRANSFORM, aside / TRANSFORM)
        (aside / ABOUT).write_text(json.dumps(asdict(bundle.about), indent=1), encoding="utf-8")
        files.write_manifest(aside)


def read_bundle(folder: Path) -> Bundle:
    """Reads a bundle and checks the hash of every file.

    Raises:
        DataError: the folder is not a bundle, has another format, or a file is missing, changed or added.
    """
    stored = read_codes(folder)
    try:
        about = typed_json.parse((folder / ABOUT).read_bytes(), About)
        if about.quantizer not in QUANTIZERS:
            raise ValueError(f"quantizer {about.quantizer}, this version knows {', '.join(QUANTIZERS)}")
        quantizer = QUANTIZERS[about.quantizer].load(load_file(folder / _QUANTIZER))
        if hash_transform(folder) != about.transform:
            raise ValueError("its transform is not the one that bundle.json names")
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        SafetensorError,
        pa.ArrowException,
    ) as error:
        raise DataError(f"{folder}: damaged ({error}); make it again with `recsys sid fit`") from None
    ids = pl.Series(ITEM, pl.from_arrow(stored.ids))
    return Bundle(about, ids, stored.codes, stored.digits, quantizer)
