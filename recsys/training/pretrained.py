"""Initializes rows of embedding tables with vectors from parquet files, as `id { init_from {} }` asks."""

import logging

import torch
from torch import nn

from recsys import protos as pb
from recsys.data.pretrained_rows import pretrained_tables
from recsys.errors import ConfigError
from recsys.modules.embedding import table_of

log = logging.getLogger(__name__)


@torch.no_grad()
def initialize(model: nn.Module, pipeline: pb.Pipeline) -> None:
    """Writes the vectors into the tables of a model that is not sharded yet.

    Raises:
        ConfigError: the model does not embed the table.
        DataError: a file cannot be used.
    """
    weights = {table_of(name): weight for name, weight in model.named_parameters()}
    for table in pretrained_tables(pipeline):
        if table.table not in weights:
            raise ConfigError(f"id.init_from of table {table.table}: the model has no such embedding table")
        weight = weights[table.table]
        for vectors in table:
            values = torch.from_numpy(vectors.values).to(weight)
            weight.index_copy_(0, torch.from_numpy(vectors.rows).to(weight.device), values)
        log.info("%s", table.line())
