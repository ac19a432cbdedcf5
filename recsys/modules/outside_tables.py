"""`OutsideTables`: stands in for embedding tables whose rows a package looks up outside of its programs.

In eager mode it calls a function for each table. While a graph is captured, the looked-up rows are inputs of
the graph; see `RowsAsInputs`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

LookUp = Callable[[Tensor], Tensor]
"""Maps rows of a table, int64 [n] on any device, to float32 [n, width] on the same device."""


class OutsideTables(nn.Module):
    """Looks up rows like an `EmbeddingCollection`, but has no weights.

    Args:
        columns: names of the columns that read each table, by table.
        widths: width of each table.
        look_ups: the function that looks up rows of each table; replace entries to look up elsewhere.
    """

    def __init__(
        self,
        columns: Mapping[str, Sequence[str]],
        widths: Mapping[str, int],
        look_ups: Mapping[str, LookUp],
    ):
        super().__init__()
        self.table_of = {column: table for table, names in columns.items() for column in names}
        self.widths = dict(widths)
        self.look_ups = dict(look_ups)
        self._given: Mapping[str, Tensor] | None = None

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Returns column -> the vectors of its ids, float32."""
        by_column = ids.to_dict()
        return {
            column: JaggedTensor(
                values=self._rows(column, by_column[column].values()), lengths=by_column[column].lengths()
            )
            for column in self.table_of
        }

    @contextmanager
    def given(self, rows: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block `forward` takes these rows, column -> [ids, width]; other columns are empty."""
        self._given = rows
        try:
            yield
        finally:
            self._given = None

    def _rows(self, column: str, ids: Tensor) -> Tensor:
        table = self.table_of[column]
        if self._given is None:
            return self.look_ups[table](ids)
        if column in self._given:
            return self._given[column]
        return torch.zeros(ids.shape[0], self.widths[table], device=ids.device)


class RowsAsInputs(nn.Module):
    """A graph whose last inputs are the looked-up rows of columns.

    Args:
        inner: the graph of the other inputs. A captured module may not have a child of the name `graph`.
        tables: the stand-in for the tables within `inner`.
        columns: the columns in the order of the inputs.
    """

    def __init__(self, inner: nn.Module, tables: OutsideTables, columns: Sequence[str]):
        super().__init__()
        self.inner, self.tables, self.columns = inner, tables, list(columns)

    def forward(self, *tensors: Tensor):
        """Maps the inputs of `inner`, then float32 [ids, width] for each column, to the result of `inner`."""
        count = len(tensors) - len(self.columns)
        with self.tables.given(dict(zip(self.columns, tensors[count:], strict=True))):
            return self.inner(*tensors[:count])
