"""Embedding tables of a package that are memory-mapped files, looked up outside of the compiled programs.

`tables/<table>.npy` is an array in NumPy's format: float32 or float16 [rows, width] as trained, or uint8
[rows, bytes] in FBGEMM's fused row-wise form, in which scale and offset follow the numbers of a row. A
program takes the looked-up rows as inputs after its others, one for each column that reads such a table.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from recsys import files
from recsys import protos as pb
from recsys.config import features
from recsys.errors import shortened
from recsys.inference.program import PackageError
from recsys.models.signature import TensorSpec
from recsys.modules.outside_tables import OutsideTables, RowsAsInputs

FOLDER = "tables"

_BLOCK_BYTES = 64 << 20
"""Trained bytes that are converted at a time."""

_QUANTIZED = {pb.ExportTables.INT8: "int8", pb.ExportTables.INT4: "int4"}

log = logging.getLogger(__name__)


class TrainedTable(Protocol):
    """The rows of a trained table, such as `training.stored_table.StoredTable`."""

    rows: int
    width: int
    dtype: np.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Reads consecutive rows, [stop - start, width]."""
        ...

    def look_up(self, rows: Tensor) -> Tensor:
        """Reads any rows, float32 [n, width]."""
        ...


@dataclass(frozen=True)
class TableEntry:
    """The entry of one table in `package.json`.

    Attributes:
        name: the table's name in the config.
        dtype: "float32", "float16", "int8" or "int4".
        rows, width: its shape.
    """

    name: str
    dtype: str
    rows: int
    width: int

    @property
    def file(self) -> str:
        """Path of the file within the package."""
        return f"{FOLDER}/{self.name}.npy"


class TableRows(NamedTuple):
    """Storage of the rows of a table: the array's dtype, and its number of columns."""

    dtype: np.dtype
    columns: int

    @classmethod
    def of(cls, entry: TableEntry) -> "TableRows":
        """Returns the form of a table's file; raises ValueError for an unknown dtype."""
        quantized = {"int8": entry.width + 8, "int4": entry.width // 2 + 4}
        if entry.dtype in quantized:
            return cls(np.dtype(np.uint8), quantized[entry.dtype])
        if entry.dtype not in ("float32", "float16"):
            raise ValueError(f"table {entry.name}: {shortened(entry.dtype)} is no dtype of a table")
        return cls(np.dtype(entry.dtype), entry.width)


class MappedTable:
    """A table of a package, whose file is mapped into memory for reading. Check the file's hash first.

    Args:
        folder: the package's folder.
        entry: the table's entry in `package.json`.

    Raises:
        PackageError: the file is not what the entry says.
    """

    def __init__(self, folder: Path, entry: TableEntry):
        self.entry, self._path = entry, folder / entry.file
        try:
            stored = np.load(self._path, mmap_mode="r", allow_pickle=False)
            expected = TableRows.of(entry)
        except (OSError, ValueError) as error:
            raise PackageError(f"{self._path}: cannot be read ({error}): export it again") from error
        if stored.dtype != expected.dtype or stored.shape != (entry.rows, expected.columns):
            actual = f"{stored.dtype} {list(stored.shape)}"
            wanted = f"{expected.dtype} {[entry.rows, expected.columns]}"
            raise PackageError(f"{self._path}: it is {actual}, not {wanted}: export it again")
        self._stored = np.asarray(stored)

    def look_up(self, rows: Tensor) -> Tensor:
        """Returns rows of the table, float32 [n, width] on the device of `rows`, int64 [n].

        Raises:
            PackageError: a row is not in the table.
        """
        wanted = rows.cpu().numpy()
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.entry.rows:
            raise PackageError(
                f"{self._path}: rows {wanted.min()} to {wanted.max()} were asked for, and the table has rows "
                f"0 to {self.entry.rows - 1}"
            )
        stored = torch.from_numpy(np.take(self._stored, wanted, axis=0))
        return dequantized(stored, self.entry.dtype).to(rows.device)


def open_tables(folder: Path, entries: Sequence[TableEntry]) -> dict[str, MappedTable]:
    """Maps the tables of a package whose files have been checked, by name.

    Raises:
        PackageError: a file is not in the manifest, or not what its entry says.
    """
    checked = files.listed_names(folder)
    for entry in entries:
        if entry.file not in checked:
            raise PackageError(f"{folder / entry.file}: is not in {files.MANIFEST}: export it again")
    return {entry.name: MappedTable(folder, entry) for entry in entries}


def quantized(rows: Tensor, dtype: str) -> Tensor:
    """Converts trained rows [n, width] to the form of the file: float16 or float32 stay unchanged."""
    if dtype == "int8":
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.float())
    if dtype == "int4":
        return torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows.float(), 4)
    return rows


def dequantized(stored: Tensor, dtype: str) -> Tensor:
    """Converts rows of a file to float32 [n, width]."""
    if dtype == "int8":
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(stored)
    if dtype == "int4":
        return torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(stored, 4)
    return stored.float()


def write_tables(folder: Path, tables: Mapping[str, TrainedTable], dtype: int) -> dict[str, MappedTable]:
    """Writes tables into a package block by block and maps the files.

    Args:
        folder: the package's folder.
        tables: the trained tables by name.
        dtype: `export.tables.dtype`.

    Raises:
        OSError: a file cannot be written.
    """
    (folder / FOLDER).mkdir()
    mapped = {}
    for name, table in tables.items():
        entry = TableEntry(name, _QUANTIZED.get(dtype, table.dtype.name), table.rows, table.width)
        log.info("writing table %s: %d rows of %d numbers as %s", name, table.rows, table.width, entry.dtype)
        _write(folder / entry.file, entry, table)
        mapped[name] = MappedTable(folder, entry)
    return mapped


def _write(path: Path, entry: TableEntry, table: TrainedTable) -> None:
    form = TableRows.of(entry)
    header = {"descr": form.dtype.str, "fortran_order": False, "shape": (entry.rows, form.columns)}
    step = max(1, _BLOCK_BYTES // (entry.width * table.dtype.itemsize))
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, entry.rows, step):
            block = torch.from_numpy(table.read(start, min(start + step, entry.rows)))
            quantized(block, entry.dtype).numpy().tofile(file)


def by_column(pipeline: pb.Pipeline, tables: Mapping[str, MappedTable]) -> dict[str, MappedTable]:
    """Returns the mapped table of each column that reads one, by the column's name."""
    return {
        column: tables[table.name]
        for table in features.tables(pipeline)
        if table.name in tables
        for column in table.columns
    }


class RowInputs:
    """The inputs of a program that are looked-up rows.

    Args:
        specs: the other inputs of the program, in order.
        tables: the mapped tables by column.

    Attributes:
        columns: the columns among `specs` that read such a table, in order.
        specs: describes the inputs, one for each of these columns.
    """

    def __init__(self, specs: Sequence[TensorSpec], tables: Mapping[str, MappedTable]):
        self._tables = [(place, tables[spec.name]) for place, spec in enumerate(specs) if spec.name in tables]
        ids = [specs[place] for place, _ in self._tables]
        self.columns = [spec.name for spec in ids]
        self.specs = [
            TensorSpec(f"{spec.name}.rows", torch.float32, (*spec.dims, str(table.entry.width)))
            for spec, (_, table) in zip(ids, self._tables, strict=True)
        ]

    def of(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Looks up the rows that the other inputs name."""
        return tuple(table.look_up(inputs[place]) for place, table in self._tables)

    def added_to(self, graph: nn.Module, tables: OutsideTables | None) -> nn.Module:
        """Returns the graph with these inputs behind its others."""
        return RowsAsInputs(graph, tables, self.columns) if tables is not None and self.columns else graph
