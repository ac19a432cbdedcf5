"""`recsys.batches`: rows of a data frame or of files, ready to train on and to evaluate."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import torch

from recsys import protos as pb
from recsys.api.configs import Config
from recsys.api.rows import Rows, to_table
from recsys.data.batch import Batch
from recsys.data.loader import Loader
from recsys.data.schema.contract import Mode
from recsys.data.sources import open_source
from recsys.data.sources.memory import PROTOCOL, MemoryFile
from recsys.errors import ConfigError, DataError
from recsys.models import layout_rule

SPLITS = ("train", "validation", "test")


class Batches:
    """Rows that `fit` and `evaluate` read, as the config says: truncated, shuffled, cut into batches.

    Iterating yields the batches of one pass in the order of the rows, as evaluation reads them.

    Attributes:
        source: where the rows are, as a message of the config.
        num_rows: number of rows.
        columns: names of the columns that prediction reads; training and evaluation read labels too.
    """

    def __init__(self, source: pb.Source, cfg: Config, owned: MemoryFile | None = None) -> None:
        """Checks the rows; call `recsys.batches` instead. `owned` is the table in memory that `source` names.

        Raises:
            DataError: there are no rows, or an input of the model is missing.
        """
        self.source = source
        self._config = cfg
        self._owned = owned
        opened = open_source(source, cfg.pipeline)
        self.num_rows = opened.num_rows
        if not self.num_rows:
            raise DataError(f"{', '.join(file.path for file in opened.files)}: there are no rows.")
        self.columns = opened.check(cfg.pipeline, "predict")

    def __iter__(self) -> Iterator[Batch]:
        return self.loader("evaluate").epoch(0)

    def __len__(self) -> int:
        return self.loader("evaluate").num_batches()

    def __repr__(self) -> str:
        return f"<recsys.Batches: {self.num_rows} rows; the model reads {', '.join(self.columns)}>"

    def loader(self, mode: Mode, *, shuffle: bool = False, rank: int = 0, world_size: int = 1) -> Loader:
        """Opens a reader of the rows, for a training loop of your own.

        Rows in files are read by `data.num_workers` processes, rows in memory by this one.

        >>> for batch in batches.loader("train", shuffle=True).epoch(0):
        ...     outputs = model.module(batch)

        Args:
            mode: purpose of the rows: "train", "evaluate", or "predict", which reads no labels.
            shuffle: mix the rows, differently in each epoch.
            rank, world_size: number of this reader, and number of readers that share the rows.

        Raises:
            DataError: a column that `mode` needs is missing, or a row is bad.
        """
        pipeline = pb.Pipeline()
        pipeline.CopyFrom(self._config.pipeline)
        for split in SPLITS:
            pipeline.data.ClearField(split)
        pipeline.data.train.CopyFrom(self.source)
        # Other processes do not see tables in memory, and a process that ends with its parent may start none.
        if PROTOCOL in str(pipeline) or multiprocessing.current_process().daemon:
            pipeline.data.num_workers = 0
        rule = layout_rule(pipeline)
        return Loader.open(
            pipeline, self.source, rule, rank=rank, world_size=world_size, shuffle=shuffle, mode=mode
        )


def batches(rows: Rows | str | Path, cfg: Config) -> Batches:
    """Takes rows to train on or to evaluate, and checks that the columns the model reads are there.

    >>> train = recsys.batches(frame, cfg)
    >>> test = recsys.batches("data/test/*.parquet", cfg)
    >>> validation = recsys.batches("validation", cfg)  # data.validation of the config

    Args:
        rows: a pandas or polars DataFrame, a pyarrow Table, a dict of columns; the path, folder or pattern of
            parquet files, local or any fsspec address; or "train", "validation" or "test" for the rows that
            the config names. A row is a request: `docs` and configs/REFERENCE.md list the columns.
        cfg: config of the model that will read the rows.

    Raises:
        DataError: there are no rows, or columns are missing or have a wrong type; the message names them all.
        ConfigError: the config does not name the split.
    """
    if not isinstance(cfg, Config):
        raise ConfigError(f"cfg: a {type(cfg).__name__} is given; give the recsys.Config of the model")
    if isinstance(rows, str) and rows in SPLITS:
        if not cfg.pipeline.data.HasField(rows):
            raise ConfigError(f"data.{rows}: the config names no rows for it; give a table or a path")
        return Batches(getattr(cfg.pipeline.data, rows), cfg)
    if isinstance(rows, str | Path):
        return Batches(pb.Source(parquet=pb.ParquetSource(paths=[str(rows)])), cfg)
    owned = MemoryFile(to_table(rows), "rows")
    return Batches(pb.Source(parquet=pb.ParquetSource(paths=[owned.address])), cfg, owned)


def as_batches(rows: "Batches | Rows | str | Path", cfg: Config) -> Batches:
    """Converts rows in any form to `Batches` for a model's config."""
    return rows if isinstance(rows, Batches) else batches(rows, cfg)


def device() -> torch.device:
    """Returns the device of models that are built or loaded: a GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
