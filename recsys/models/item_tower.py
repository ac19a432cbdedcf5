"""The item tower of a model that searches items, as a function of flat tensors.

`flatten_items` converts a batch's negatives to tensors in the order of `item_signature`; `ItemTower` encodes
them. The user tower is in `scoring`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from recsys import protos as pb
from recsys.config import features
from recsys.data.batch import Batch
from recsys.models.base import Model
from recsys.models.signature import TensorSpec

ITEMS = "items"
"""Name of an input dimension: the number of items."""


class Items(NamedTuple):
    """Items alone, in the same form as a batch's shared items, for the item tower.

    Attributes:
        ids, value_counts, numbers: as in `Batch`, with empty columns of rows.
    """

    ids: KeyedJaggedTensor
    value_counts: dict[str, Tensor]
    numbers: dict[str, Tensor]


def item_signature(pipeline: pb.Pipeline) -> list[TensorSpec]:
    """Lists the inputs of the item tower of a resolved pipeline, in order.

    First come the items as rows of their table (0 for an item that training did not know), then each column
    of side ITEM. A multi-valued column is followed by `<column>.counts`, the number of values of each item.
    """
    inputs = [TensorSpec(features.NEGATIVES, torch.int64, (ITEMS,))]
    for number, column in enumerate(features.columns(pipeline, pb.ITEM)):
        size = f"values_{number}" if column.multi_valued else ITEMS
        dtype = torch.float32 if column.table is None else torch.int64
        inputs.append(TensorSpec(column.name, dtype, (size, *map(str, column.batch_shape))))
        if column.multi_valued:
            inputs.append(TensorSpec(f"{column.name}.counts", torch.int64, (ITEMS,)))
    return inputs


def flatten_items(batch: Batch, pipeline: pb.Pipeline) -> tuple[Tensor, ...]:
    """Returns the item tower's inputs for the negatives of a batch that was read for evaluation."""
    tensors = []
    for spec in item_signature(pipeline):
        column = spec.name.removesuffix(".counts")
        if column != spec.name:
            tensors.append(batch.value_counts[column])
        elif spec.dtype == torch.float32:
            tensors.append(batch.numbers[column])
        else:
            # A column is a slice, but compiled code needs tensors that begin at an aligned address.
            tensors.append(batch.ids[column].values().clone())
    return tuple(tensors)


def first_items(inputs: tuple[Tensor, ...], specs: list[TensorSpec], count: int | None) -> tuple[Tensor, ...]:
    """Keeps the first `count` items of the item tower's inputs; None keeps all."""
    by_name = {spec.name: tensor for spec, tensor in zip(specs, inputs, strict=True)}
    first = []
    for spec, tensor in zip(specs, inputs, strict=True):
        counts = by_name.get(f"{spec.name}.counts")
        first.append(tensor[:count] if counts is None else tensor[: int(counts[:count].sum())])
    return tuple(first)


class ItemTower(nn.Module):
    """Computes the vectors of n items, float32 [n, E], from flat tensors.

    Args:
        model: a model that searches items, in evaluation mode.
    """

    def __init__(self, model: Model):
        super().__init__()
        self.model = model
        pipeline = model.pipeline
        self.names = [spec.name for spec in item_signature(pipeline)]
        columns = [*features.columns(pipeline), *features.columns(pipeline, pb.ITEM)]
        embedded = [column.name for column in columns if column.table is not None]
        self.keys = [*embedded, *features.shared_columns(pipeline)]
        self.multi_valued = [column.name for column in columns if column.multi_valued]
        self.numbers = {column.name: column.batch_shape for column in columns if column.table is None}

    def forward(self, *tensors: Tensor) -> Tensor:
        """Maps the tensors that `item_signature` lists to vectors, float32 [n, E]."""
        by_name = dict(zip(self.names, tensors, strict=True))
        nothing = by_name[features.NEGATIVES].new_zeros(0)
        values = [by_name.get(key, nothing) for key in self.keys]
        sizes = [tensor.shape[0] for tensor in values]
        ids = KeyedJaggedTensor(
            keys=self.keys,
            values=torch.cat(values),
            lengths=torch.cat(
                [torch.full((1,), size, dtype=torch.int64, device=nothing.device) for size in sizes]
            ),
            stride=1,
            length_per_key=sizes,
        )
        counts = {name: by_name.get(f"{name}.counts", nothing) for name in self.multi_valued}
        real = nothing.to(torch.float32)
        numbers = {
            name: by_name[name] if name in by_name else real.new_zeros(0, *shape)
            for name, shape in self.numbers.items()
        }
        return self.model.item_vectors(Items(ids, counts, numbers))
