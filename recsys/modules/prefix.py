"""`Prefix`: facts about cached tokens that preprocessors need to encode candidates and later events."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.ops import SequenceLayout


@dataclass(frozen=True, eq=False)
class Prefix:
    """Facts about contextual and history tokens that the encoding of candidates and later events needs.

    Attributes:
        lengths: int64 [channels, B], number of contextual and history tokens of each row; a model without
            channels counts as having one channel.
        num_contextual: number of contextual tokens per row.
        users: float32 [B, C], the concatenated USER features if encoders compute weights from them; else
            None.
    """

    lengths: Tensor
    num_contextual: int
    users: Tensor | None

    @classmethod
    def of(cls, layout: SequenceLayout, users: Tensor | None) -> "Prefix":
        """Builds the prefix of sequences without targets; `layout` joins the sequences of all channels."""
        lengths = torch.stack([part.lengths for part in layout.parts or (layout,)])
        return cls(lengths, layout.num_contextual, users)

    @classmethod
    def join(cls, prefixes: Sequence["Prefix"]) -> "Prefix":
        """Joins the rows of prefixes of the same model, in order."""
        users = [prefix.users for prefix in prefixes if prefix.users is not None]
        lengths = torch.cat([prefix.lengths for prefix in prefixes], dim=1)
        return cls(lengths, prefixes[0].num_contextual, torch.cat(users) if users else None)

    def select(self, rows: Sequence[int]) -> "Prefix":
        """Returns the prefix of these rows in this order; a row may occur more than once."""
        index = torch.tensor(rows, dtype=torch.int64).to(self.lengths.device, non_blocking=True)
        users = None if self.users is None else self.users.index_select(0, index)
        return Prefix(self.lengths.index_select(1, index), self.num_contextual, users)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Prefix":
        """Returns a copy on a device."""
        users = None if self.users is None else self.users.to(device, non_blocking=non_blocking)
        return Prefix(self.lengths.to(device, non_blocking=non_blocking), self.num_contextual, users)

    def append(self, events: SequenceLayout) -> "Prefix":
        """Returns the prefix of the same rows with these events appended to their histories."""
        return Prefix(self.lengths + events.lengths.view_as(self.lengths), self.num_contextual, self.users)
