"""Implements `recsys.config`, which makes a resolved and checked config from a text, file or other config."""

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path

import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

import recsys.config as configs
from recsys import protos as pb
from recsys.api.rows import Rows, to_table
from recsys.config import Loaded, Parsed, textproto
from recsys.config.declarations import model_of
from recsys.config.feature_kinds import FeatureKind, kinds
from recsys.data.arrow import one_array
from recsys.data.sources.memory import MemoryFile
from recsys.errors import ConfigError, DataError
from recsys.prepare.dataset_writer import IdCounts

_LATER = "memory:///rows-that-batches-will-give.parquet"
"""Placeholder for training and validation rows while a config without them is checked."""

_COUNTED_SIDES = (pb.CANDIDATE, pb.HISTORY, pb.USER)
"""Sides whose columns hold the events to count, in order of preference."""

_NO_FILE = "vocabulary.file: not set"

_HINT = (
    "Or let recsys.config count the ids: give it vocabularies=ROWS with your training rows, or a dict from "
    "the name of each table to its ids."
)


class Config:
    """A resolved and checked config. `print` shows each setting and its origin.

    Attributes:
        pipeline: the resolved message, to read settings such as `cfg.pipeline.model.embedding_dim`. Do not
            change it: `recsys.config(cfg, ["train.num_steps=100"])` makes a new config.
        warnings: one line for each setting that is allowed but has no effect or a surprising one.
    """

    def __init__(self, loaded: Loaded, ready: configs.Ready, owned: Sequence[MemoryFile] = ()) -> None:
        """Wraps a prepared config; call `recsys.config` instead. `owned` are the tables in memory that the
        config names."""
        self._loaded = loaded
        self._origins = ready.origins
        self._owned = tuple(owned)
        self.pipeline = ready.pipeline
        self.warnings = ready.warnings

    def __str__(self) -> str:
        return configs.to_text(self.pipeline, self._origins).rstrip()

    def __repr__(self) -> str:
        names = ", ".join(feature.name for feature in self.pipeline.features)
        kind, width = model_of(self.pipeline).kind, self.pipeline.model.embedding_dim
        return f"<recsys.Config: {kind} of width {width}, features {names}; print it to see every setting>"


def config(
    source: str | Path | Config,
    overrides: Sequence[str] = (),
    *,
    vocabularies: Rows | None = None,
    items: Rows | None = None,
) -> Config:
    """Reads, completes and checks a config.

    >>> cfg = recsys.config("configs/quickstart.config", ["train.num_steps=100"])
    >>> print(cfg)  # every setting, with the origin of those that the file does not give

    Args:
        source: the text of a config, the path of a file, or a config to change.
        overrides: assignments such as `train.num_steps=100`, as for the flag `--set` of the commands.
        vocabularies: the ids of each embedding table for which the config names no file: either training
            rows, whose ids are counted and sorted by frequency, or a mapping from a table's name to its ids.
        items: the features of a retriever's items, as a table with one row per item; replaces
            `data.item_file`.

    Returns:
        A config that `build`, `batches` and `fit` accept. It may lack `data.train` and `data.validation`,
        because these rows can come from data frames.

    Raises:
        ConfigError: lists all findings, one line each, with the line of the file.
        DataError: the rows lack a column whose ids are to be counted.
    """
    loaded, mistakes = _parse(source, overrides)
    owned = list(source._owned) if isinstance(source, Config) else []
    pipeline = loaded.pipeline
    if items is not None:
        owned.append(MemoryFile(to_table(items, "items"), "items"))
        pipeline.data.item_file = owned[-1].address
    if vocabularies is not None and not mistakes:
        owned += _add_vocabularies(pipeline, vocabularies)
    ready = _prepare(loaded, mistakes, overrides)
    return Config(loaded, ready, owned)


def of_pipeline(pipeline: pb.Pipeline) -> Config:
    """Returns the config of a package, as it was resolved when the package was made."""
    loaded = Loaded(pipeline, {})
    return Config(loaded, _prepare(loaded, (), ()))


def in_memory(cfg: Config) -> Config:
    """Returns the config without its rows, and with tables in memory instead of its other files."""
    loaded, mistakes = _parse(cfg, ())
    data = loaded.pipeline.data
    for field in ("train", "validation", "test", "vocabulary_dir"):
        data.ClearField(field)
    owned: dict[str, MemoryFile] = {}

    def copy(path: str, name: str) -> str:
        if path not in owned:
            with fsspec.open(path, "rb") as file:
                owned[path] = MemoryFile(pq.read_table(file), name)
        return owned[path].address

    for kind, resolved in zip(kinds(loaded.pipeline), kinds(cfg.pipeline), strict=True):
        if kind.vocabulary is not None:
            kind.vocabulary.file = copy(resolved.vocabulary.file, resolved.table)
    if data.item_file:
        data.item_file = copy(data.item_file, "items")
    return Config(loaded, _prepare(loaded, mistakes, ()), list(owned.values()))


def with_sources(cfg: Config, sources: Mapping[str, pb.Source], overrides: Sequence[str] = ()) -> pb.Pipeline:
    """Returns the resolved pipeline of a config with other rows and overrides.

    Args:
        cfg: the config.
        sources: rows by split, which replace the config's rows. Without rows for validation, the settings of
            evaluation are removed.
        overrides: assignments such as `train.num_steps=100`.

    Raises:
        ConfigError: lists all findings.
    """
    loaded, mistakes = _parse(cfg, overrides)
    data = loaded.pipeline.data
    for split, source in sources.items():
        getattr(data, split).CopyFrom(source)
    if not data.HasField("validation"):
        loaded.pipeline.train.ClearField("evaluation")
    # A process that ends with its parent may not start others.
    if multiprocessing.current_process().daemon:
        data.num_workers = 0
    return configs.prepare_loaded(loaded, mistakes).pipeline


def _parse(source: str | Path | Config, overrides: Sequence[str]) -> Parsed:
    if isinstance(overrides, str):
        raise ConfigError(f'overrides: give a list, ["{overrides}"]')
    if isinstance(source, Config):
        loaded = Loaded(pb.Pipeline(), dict(source._loaded.locations))
        loaded.pipeline.CopyFrom(source._loaded.pipeline)
        mistakes: list[str] = []
        for assignment in overrides:
            mistakes += textproto.override(loaded.pipeline, assignment, loaded.locations)
        return Parsed(loaded, mistakes)
    if isinstance(source, Path):
        return configs.read_parsed(source, overrides)
    if not isinstance(source, str):
        raise ConfigError(
            f"a {type(source).__name__} is given; give the text of a config, the path of a .config file, or "
            "a recsys.Config"
        )
    # The path of a config has neither a brace nor a line break, while every useful text has one of them.
    is_text = "{" in source or "\n" in source
    return configs.parse(source, "config", overrides) if is_text else configs.read_parsed(source, overrides)


def _prepare(loaded: Loaded, mistakes: Sequence[str], overrides: Sequence[str]) -> configs.Ready:
    checked = pb.Pipeline()
    checked.CopyFrom(loaded.pipeline)
    later = [split for split in ("train", "validation") if not checked.data.HasField(split)]
    for split in later:
        getattr(checked.data, split).parquet.paths.append(_LATER)
    try:
        ready = configs.prepare_loaded(Loaded(checked, loaded.locations), mistakes, overrides)
    except ConfigError as error:
        unknown = any(_NO_FILE in finding for finding in error.findings)
        raise ConfigError([*error.findings, _HINT] if unknown else error.findings) from None
    for split in later:
        ready.pipeline.data.ClearField(split)
    return ready


def _add_vocabularies(pipeline: pb.Pipeline, vocabularies: Rows) -> list[MemoryFile]:
    """Gives each vocabulary without a file a table in memory, and returns these tables."""
    missing: dict[str, list[FeatureKind]] = {}
    for kind in kinds(pipeline):
        if kind.vocabulary is not None and not (kind.vocabulary.file or pipeline.data.vocabulary_dir):
            missing.setdefault(kind.table, []).append(kind)
    counted = not isinstance(vocabularies, Mapping)
    rows = to_table(vocabularies, "vocabularies") if counted else None
    owned = []
    for table, readers in missing.items():
        if rows is not None:
            ids = _count(rows, table, readers)
        elif table in vocabularies:
            ids = _listed(vocabularies[table], table)
        else:
            continue
        owned.append(MemoryFile(ids, table))
        for kind in readers:
            kind.vocabulary.file = owned[-1].address
    return owned


def _count(rows: pa.Table, table: str, readers: list[FeatureKind]) -> pa.Table:
    """Counts the ids of an embedding table as the preparation tools do: each training event once.

    In rows with candidates, the candidates are the events, and histories repeat them. An id that occurs only
    in histories comes last, with count 0.
    """
    counts, item_values = IdCounts(), []
    for kind in readers:
        sides = [side for side in _COUNTED_SIDES if side in kind.feature.sides]
        columns = [name for side in sides for name in kind.columns(side)]
        present = [name for name in columns if name in rows.column_names]
        if not present:
            names = " or ".join(columns)
            raise DataError(
                f"vocabularies: no column {names} to count the ids of table {table} in; the rows have "
                f"{', '.join(rows.column_names)}"
            )
        events = _values(rows[present[0]])
        counts.add(events, pl.int_range(len(events), eager=True))
        item_values += [_values(rows[name]) for name in present[1:]]
    return counts.table(min_count=1, catalogue=pl.concat(item_values) if item_values else None)


def _values(column: pa.ChunkedArray) -> pl.Series:
    """Returns all values of a column of ids or of lists of ids, without nulls."""
    array = one_array(column)
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = array.flatten()
    return pl.Series(pl.from_arrow(array.drop_null()))


def _listed(ids: Rows, table: str) -> pa.Table:
    """Makes a vocabulary from a column of ids, or from a table with the column `id` perhaps `count`."""
    if hasattr(ids, "column_names") or hasattr(ids, "columns"):
        return to_table(ids, f"vocabularies[{table!r}]")
    return to_table({"id": ids}, f"vocabularies[{table!r}]")
