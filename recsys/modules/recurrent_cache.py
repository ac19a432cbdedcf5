"""`StateStage`: what layers of linear attention keep in a cache, of the same size for any history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.modules.distance_channels import Past


@dataclass(frozen=True, eq=False)
class StateStage:
    """The states of consecutive layers of linear attention after the contextual and history tokens.

    Attributes:
        past: lengths of the B samples, and the times of their newest events if a clock reads times.
        states: for each layer and each of its recurrences, [B, heads, D, V] in float32 or wider.
    """

    past: Past
    states: tuple[Tensor, ...]

    @classmethod
    def join(cls, stages: Sequence[StateStage]) -> StateStage:
        """Joins the samples of stages of the same layers, in order."""
        columns = zip(*(stage.all_tensors for stage in stages), strict=True)
        return stages[0]._rebuilt([torch.cat(column) for column in columns])

    def select(self, samples: Sequence[int]) -> StateStage:
        """Returns the stage with the given samples only, in this order; a sample may occur more than once.

        Raises:
            IndexError: there is no such sample.
        """
        if not all(0 <= sample < len(self.past.lengths) for sample in samples):
            raise IndexError(f"samples must be in [0, {len(self.past.lengths)}), got {list(samples)}")
        index = torch.tensor(samples, dtype=torch.int64).to(self.past.lengths.device, non_blocking=True)
        return self._map(lambda tensor: tensor.index_select(0, index))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> StateStage:
        """Returns a copy on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    @property
    def num_bytes(self) -> int:
        """The size of times and states in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The times of the newest events if a clock reads times, then the states layer by layer."""
        return self.all_tensors[1:]

    @property
    def all_tensors(self) -> tuple[Tensor, ...]:
        """The lengths, then `tensors`."""
        newest = () if self.past.newest is None else (self.past.newest,)
        return (self.past.lengths, *newest, *self.states)

    def _map(self, change: Callable[[Tensor], Tensor]) -> StateStage:
        return self._rebuilt([change(tensor) for tensor in self.all_tensors])

    def _rebuilt(self, tensors: Sequence[Tensor]) -> StateStage:
        lengths, *rest = tensors
        newest = None if self.past.newest is None else rest.pop(0)
        return StateStage(Past(lengths, self.past.num_contextual, newest), tuple(rest))
