"""Initializes rows of embedding tables with vectors from parquet files, as `id { init_from {} }` asks."""

import logging

import numpy as np
import torch

from recsys import protos as pb
from recsys.data.pretrained_rows import Vectors, pretrained_tables
from recsys.errors import ConfigError
from recsys.modules.embedding import table_of
from recsys.training.checkpoint import Tensors
from recsys.training.host_copies import placed_parts

log = logging.getLogger(__name__)


def initialize(weights: Tensors, pipeline: pb.Pipeline) -> None:
    """Writes the vectors into the tables; each rank reads the files and takes what belongs to its rows.

    Args:
        weights: parameters of this rank, by their names in the model or in a checkpoint.
        pipeline: the resolved config.

    Raises:
        ConfigError: the model does not embed the table.
        DataError: a file cannot be used.
    """
    by_table = {table_of(name): weight for name, weight in weights.items()}
    for table in pretrained_tables(pipeline):
        if table.table not in by_table:
            raise ConfigError(f"id.init_from of table {table.table}: the model has no such embedding table")
        parts = placed_parts(by_table[table.table])
        for vectors in table:
            for part, place in parts:
                _write(vectors, part, place)
        log.info("%s", table.line())


def _write(vectors: Vectors, part: torch.Tensor, place: tuple[int, ...]) -> None:
    """Writes the rows and columns that a part of a table has; its first element is at `place`."""
    rows = vectors.rows - place[0]
    here = np.flatnonzero((rows >= 0) & (rows < len(part)))
    values = torch.from_numpy(vectors.values[here, place[1] : place[1] + part.size(1)]).to(part)
    part.index_copy_(0, torch.from_numpy(rows[here]).to(part.device), values)
