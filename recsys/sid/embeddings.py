"""A folder of item vectors, with the transform that made them and that makes comparable vectors of new items.

manifest.json          hashes of the other files
embeddings.json        settings, hash of the ids, hash of the transform
embeddings.parquet     item_id, embedding
transform/             arrays.safetensors, terms.json (TF-IDF), transform.json
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from recsys import files, typed_json
from recsys.data.codes import hash_ids, require_whole
from recsys.errors import ConfigError, DataError
from recsys.sid import sources
from recsys.sid.catalogue import ITEM, read_ids, read_texts, read_training_histories, read_vectors

SOURCES = ("text", "cooc", "file")
ENCODERS = ("tfidf", "minilm")

TRANSFORM = "transform"
"""Name of the folder of a transform, in a folder of vectors and in a bundle."""

TRANSFORM_FILE = f"{TRANSFORM}/transform.json"
"""The file that marks a folder with a transform."""

_FILE, _VECTORS = "embeddings.json", "embeddings.parquet"
_ARRAYS, _TERMS, _ABOUT = "arrays.safetensors", "terms.json", "transform.json"


@dataclass(frozen=True)
class ItemTable:
    """Names sources of item texts and vectors other than the data folder.

    Attributes:
        items: item table with texts (.parquet, .csv, .jsonl); None: the texts of the data folder.
        id_column: name of the id column of `items` and `vectors`.
        text_columns: text columns, in the order of the text; empty: all columns but the ids.
        vectors: file with the vectors of the source "file".
    """

    items: Path | None = None
    id_column: str = ITEM
    text_columns: tuple[str, ...] = ()
    vectors: Path | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of a transform.

    Attributes:
        sources: names from `SOURCES`.
        weights: factor of the unit vectors of each source.
        encoder: text encoder, one of `ENCODERS`.
        seed: seed of the randomized decompositions.
    """

    sources: list[str]
    weights: list[float]
    encoder: str = "tfidf"
    seed: int = 0


@dataclass(frozen=True)
class Transform:
    """Turns the texts, events and vectors of items into one vector each.

    Attributes:
        settings: sources, in the order of their parts of the vector.
        whitenings: the whitening of each source.
        terms: TF-IDF terms of the text source; None without them.
        neighbors: float32 [D, K], predicts the co-occurrence of an item without any from its vectors in the
            other sources; None if there is no other source, or the transform was made before this map was.
    """

    settings: Settings
    whitenings: dict[str, sources.Whitening]
    terms: sources.TextTerms | None
    neighbors: np.ndarray | None = None

    @property
    def dim(self) -> int:
        """The width of a vector."""
        return sum(self.whitenings[name].components.shape[1] for name in self.settings.sources)

    def apply(self, data: Path, ids: pl.Series, table: ItemTable) -> np.ndarray:
        """Returns the vectors of items that may be new since the transform was fitted: float32 [items, dim].

        Their co-occurrence is predicted from the other sources, because the transform does not know their
        neighbors.
        """
        parts = {}
        for name in self.settings.sources:
            white = self.whitenings[name]
            if name == "cooc":
                parts[name] = np.zeros((len(ids), white.components.shape[1]), np.float32)
                continue
            raw = _raw_text(data, ids, table, self) if name == "text" else _raw_file(ids, table)
            if raw.shape[1] != len(white.mean):
                raise DataError(
                    f"{table.vectors or data}: vectors of {raw.shape[1]} numbers, the transform was "
                    f"fitted on {len(white.mean)}; use the same source"
                )
            parts[name] = white.apply(raw)
        return self.join(parts)

    def join(self, parts: dict[str, np.ndarray]) -> np.ndarray:
        """Joins the unit vectors of the sources, [items, K] each, after filling in missing co-occurrence."""
        if self.neighbors is not None:
            lacks = ~parts["cooc"].any(1)
            predicted = sources.apply_map(_without_events(parts)[lacks], self.neighbors)
            parts = {**parts, "cooc": parts["cooc"].copy()}
            parts["cooc"][lacks] = predicted
        factors = zip(self.settings.sources, self.settings.weights, strict=True)
        return np.concatenate([parts[name] * np.float32(weight) for name, weight in factors], 1)

    def write(self, folder: Path) -> None:
        """Writes the files of the transform into a new folder."""
        folder.mkdir()
        arrays = {}
        for name, white in self.whitenings.items():
            arrays |= {f"{name}.mean": white.mean, f"{name}.components": white.components}
        if self.neighbors is not None:
            arrays["cooc.neighbors"] = self.neighbors
        if self.terms is not None:
            arrays |= {"terms.idf": self.terms.idf, "terms.directions": self.terms.directions}
            (folder / _TERMS).write_text(json.dumps(self.terms.terms), encoding="utf-8")
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / _ARRAYS)
        (folder / _ABOUT).write_text(json.dumps(asdict(self.settings), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Transform":
        """Reads the files that `write` wrote. The caller has checked the manifest of the enclosing folder.

        Raises:
            DataError: a file is damaged.
        """
        try:
            settings = typed_json.parse((folder / _ABOUT).read_bytes(), Settings)
            arrays = load_file(folder / _ARRAYS)
            whitenings = {
                name: sources.Whitening(arrays[f"{name}.mean"], arrays[f"{name}.components"])
                for name in settings.sources
            }
            terms = None
            if "terms.idf" in arrays:
                words = typed_json.parse((folder / _TERMS).read_bytes(), list[str])
                terms = sources.TextTerms(words, arrays["terms.idf"], arrays["terms.directions"])
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise DataError(f"{folder}: damaged ({error}); make it again") from None
        return cls(settings, whitenings, terms, arrays.get("cooc.neighbors"))


@dataclass(frozen=True)
class Embeddings:
    """Vectors of items.

    Attributes:
        ids: sorted ids of the items.
        vectors: float32 [items, D].
        transform: the transform that made them.
    """

    ids: pl.Series
    vectors: np.ndarray
    transform: Transform


def embed(data: Path, settings: Settings, table: ItemTable) -> Embeddings:
    """Fits a transform on all items of a data folder, and co-occurrence on its training rows only.

    Raises:
        ConfigError: a source has no information on the items.
        DataError: files are missing or damaged.
        InstallationError: a library of a source is missing.
    """
    ids = read_ids(data)
    raw: dict[str, np.ndarray] = {}
    terms = None
    for name in settings.sources:
        if name == "cooc":
            histories = read_training_histories(data, ids)
            raw[name] = sources.co_occurrence(histories, len(ids), settings.seed)
        elif name == "file":
            raw[name] = _raw_file(ids, table)
        else:
            texts = read_texts(data, ids, table.items, table.id_column, table.text_columns)
            if settings.encoder == "tfidf":
                terms = sources.TextTerms.fit(texts, settings.seed)
            raw[name] = terms.apply(texts) if terms is not None else sources.sentence_vectors(texts)
    whitenings = {name: sources.Whitening.fit(vectors) for name, vectors in raw.items()}
    parts = {name: whitenings[name].apply(raw[name]) for name in settings.sources}
    neighbors = None
    if "cooc" in parts and len(parts) > 1:
        neighbors = sources.fit_map(_without_events(parts), parts["cooc"])
    transform = Transform(settings, whitenings, terms, neighbors)
    return Embeddings(ids, transform.join(parts), transform)


def _without_events(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Joins the vectors of the sources that know an item before its first event, [items, D]."""
    return np.concatenate([part for name, part in parts.items() if name != "cooc"], 1)


def _raw_text(data: Path, ids: pl.Series, table: ItemTable, transform: Transform) -> np.ndarray:
    texts = read_texts(data, ids, table.items, table.id_column, table.text_columns)
    return transform.terms.apply(texts) if transform.terms is not None else sources.sentence_vectors(texts)


def _raw_file(ids: pl.Series, table: ItemTable) -> np.ndarray:
    if table.vectors is None:
        raise ConfigError("--source file: name the file in --vectors")
    return read_vectors(table.vectors, ids, table.id_column)


def write_embeddings(folder: Path, embeddings: Embeddings) -> None:
    """Writes a folder atomically: after an error, there is either no folder or the old one."""
    with files.whole_folder(folder) as aside:
        pq.write_table(
            vector_table(embeddings), aside / _VECTORS, compression="zstd", write_page_checksum=True
        )
        embeddings.transform.write(aside / TRANSFORM)
        about = {
            "items": len(embeddings.ids),
            "dim": embeddings.transform.dim,
            "ids": hash_ids(embeddings.ids),
        }
        (aside / _FILE).write_text(json.dumps(about, indent=1), encoding="utf-8")
        files.write_manifest(aside)


def vector_table(embeddings: Embeddings) -> pa.Table:
    """Returns the ids and vectors as an arrow table."""
    flat = pa.array(embeddings.vectors.reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, embeddings.vectors.shape[1])
    ids = embeddings.ids.to_arrow()
    return pa.table(
        {ITEM: ids.cast(pa.string()) if embeddings.ids.dtype == pl.String else ids, "embedding": vectors}
    )


def read_embeddings(folder: Path) -> Embeddings:
    """Reads a folder and checks the hash of every file.

    Raises:
        DataError: it is not a folder of vectors, or its files have changed.
    """
    require_whole(folder, "make it again with `recsys sid embed`", _VECTORS)
    try:
        table = pq.read_table(folder / _VECTORS)
        column = table["embedding"].combine_chunks()
        vectors = column.flatten().to_numpy().reshape(len(table), -1).astype(np.float32)
        ids = pl.Series(ITEM, pl.from_arrow(table[ITEM]))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"{folder / _VECTORS}: damaged ({error}); make it again with `recsys sid embed`"
        ) from None
    return Embeddings(ids, vectors, Transform.read(folder / TRANSFORM))


def hash_transform(folder: Path) -> str:
    """Returns a SHA-256 over the files of a transform. Vectors with the same hash can be compared."""
    digest = hashlib.sha256()
    for path in sorted((folder / TRANSFORM).iterdir()):
        digest.update(f"{path.name} {files.sha256(path)}\n".encode())
    return digest.hexdigest()
