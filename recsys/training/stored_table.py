"""`StoredTable`: reads rows of an embedding table from a checkpoint without holding the whole table.

A checkpoint stores a table as one block of numbers per shard. PyTorch tells where in a file each block
begins, so rows are read directly from the files, whatever the number of ranks that wrote them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from recsys import protos as pb
from recsys.config import features
from recsys.errors import RecsysError
from recsys.models import Model, build_model
from recsys.modules.embedding import table_of
from recsys.training import checkpoint
from recsys.training.checkpoint import AVERAGE
from recsys.training.names import MODEL
from recsys.training.restricted_unpickler import DAMAGED_TENSORS, read_metadata


class LoadedModel(NamedTuple):
    """A trained model, and its large tables, which it looks up in the checkpoint."""

    model: Model
    tables: "dict[str, StoredTable]"


def load_model(path: Path, pipeline: pb.Pipeline) -> LoadedModel:
    """Builds a model with the weights of a saved state, but leaves large tables in the state's files.

    Args:
        path: the folder of the state.
        pipeline: the resolved config; `export.tables` says which tables are large.

    Raises:
        RecsysError: the state is damaged, or was not saved by this model.
    """
    tables = {table.name: StoredTable(path, table.name) for table in features.mapped_tables(pipeline)}
    model = build_model(pipeline, outside={name: table.look_up for name, table in tables.items()})
    checkpoint.load_weights(path, model, tables)
    return LoadedModel(model.eval(), tables)


@dataclass(frozen=True)
class _Shard:
    """One block of a table: contiguous numbers in a file.

    Attributes:
        path, start: the file, and the byte at which the block begins.
        rows, columns: the part of the table that the block holds.
    """

    path: Path
    start: int
    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)


class StoredTable:
    """The rows of one embedding table in a checkpoint; averaged weights if the checkpoint has them.

    Args:
        folder: the folder of an undamaged state, see `checkpoint.find`.
        table: the table's name in the config.

    Attributes:
        rows, width: the table's shape.
        dtype: float32 or float16.

    Raises:
        RecsysError: the checkpoint has no such table, or its files cannot be read.
    """

    def __init__(self, folder: Path, table: str):
        metadata = read_metadata(folder)
        names = [name for name in metadata.state_dict_metadata if table_of(name) == table]
        averaged = [name for name in names if name.startswith(AVERAGE)]
        chosen = averaged or [name for name in names if name.startswith(MODEL)]
        if len(chosen) != 1:
            raise RecsysError(f"checkpoint {folder}: it has {len(chosen)} tables {table}, not one")
        (name,) = chosen
        entry = metadata.state_dict_metadata[name]
        self.rows, self.width = entry.size
        self.dtype = np.dtype(str(entry.properties.dtype).removeprefix("torch."))
        self._shards = []
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                path, place = folder / info.relative_path, tuple(index.offset or (0, 0))
                try:
                    self._shards.append(_shard(path, info.offset, info.length, place))
                except DAMAGED_TENSORS as error:
                    raise RecsysError(f"{path}: {name} cannot be read ({error})") from error

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads consecutive rows, [stop - start, width]."""
        block = np.zeros((stop - start, self.width), self.dtype)
        for shard in self._shards:
            first, last = max(start, shard.rows.start), min(stop, shard.rows.stop)
            if first >= last:
                continue
            width = len(shard.columns)
            offset = shard.start + (first - shard.rows.start) * width * self.dtype.itemsize
            values = np.fromfile(shard.path, self.dtype, (last - first) * width, offset=offset)
            columns = slice(shard.columns.start, shard.columns.stop)
            block[first - start : last - start, columns] = values.reshape(-1, width)
        return block

    def look_up(self, rows: Tensor) -> Tensor:
        """Reads any rows, float32 [n, width] on the device of `rows`, int64 [n]."""
        wanted = rows.cpu().numpy()
        vectors = np.zeros((len(wanted), self.width), np.float32)
        for shard in self._shards:
            inside = np.flatnonzero((wanted >= shard.rows.start) & (wanted < shard.rows.stop))
            # The mapping ends with this call, and with it the memory of the pages that it has read.
            mapped = np.memmap(shard.path, self.dtype, "r", shard.start, shard.shape)
            columns = slice(shard.columns.start, shard.columns.stop)
            vectors[inside, columns] = mapped[wanted[inside] - shard.rows.start]
        return torch.from_numpy(vectors).to(rows.device)


def _shard(path: Path, offset: int, length: int, place: tuple[int, ...]) -> _Shard:
    """Locates the numbers of an entry, which `torch.save` wrote to a part of a file.

    Raises:
        ValueError: the numbers are not in the order of the rows.
    """
    with path.open("rb") as file, FakeTensorMode():
        # A fake tensor has the place of its numbers, which are not read.
        entry = torch.load(_create_file_view(file, offset, length), weights_only=True)
    if entry.dim() != 2 or not entry.is_contiguous():
        raise ValueError(f"an entry of shape {list(entry.shape)} and strides {list(entry.stride())}")
    start = offset + entry.untyped_storage()._checkpoint_offset + entry.storage_offset() * entry.itemsize
    (row, column), (rows, columns) = place, entry.shape
    return _Shard(path, start, range(row, row + rows), range(column, column + columns))
