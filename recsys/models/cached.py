"""What a ranker keeps of users and their histories between calls, and candidates in slices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recsys.modules.cache import MixerCache, Prefix
from recsys.ops import Selection, SequenceLayout


@dataclass(frozen=True, eq=False)
class RankerCache:
    """B users with their histories, as `Ranker.prefill` leaves them. A value: no model keeps any of it.

    Attributes:
        prefix: for the encoders.
        mixer: for the layers.
    """

    prefix: Prefix
    mixer: MixerCache

    @property
    def batch_size(self) -> int:
        """B."""
        return self.prefix.lengths.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and times, and of USER features."""
        users = self.prefix.users
        return self.mixer.num_bytes + (0 if users is None else users.nbytes)

    def select(self, rows: Sequence[int]) -> "RankerCache":
        """Some users in this order, each as often as it is named; a copy."""
        return RankerCache(self.prefix.select(rows), self.mixer.select(rows))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RankerCache":
        """A copy on a device, or in the host's memory."""
        return RankerCache(self.prefix.to(device, non_blocking), self.mixer.to(device, non_blocking))


class Microbatch(NamedTuple):
    """Some candidates of some rows.

    Attributes:
        rows: those that have candidates in it.
        targets: of the sequence, those of all channels joined; samples are `rows`.
        places: int64 [n], which of the N candidates they are.
    """

    rows: list[int]
    targets: Selection
    places: Tensor


def microbatches(layout: SequenceLayout, size: int, group_size: int) -> Iterator[Microbatch]:
    """The next `size` candidates of every row that has some left, again and again.

    Args:
        layout: of the targets, those of all channels joined.
        size: candidates of a row; rounded down to whole target groups, to at least one.
        group_size: candidates of a target group.

    Raises:
        ValueError: a size below 1; or the lengths are on a device only.
    """
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
    size = max(size // group_size, 1) * group_size
    first = layout.parts[0] if layout.parts else layout
    counts = first.on_host().num_targets.tolist()
    previous, layout_of_rows = None, None
    for start in range(0, max(counts, default=0), size):
        rows = [row for row, count in enumerate(counts) if count > start]
        kept = [min(counts[row] - start, size) for row in rows]
        # Rows that are left out have no tokens in the slice, so its index stays.
        among_all, index = layout.targets_between(start, start + size)
        places = first.targets_between(start, start + size).index if layout.parts else index
        if layout_of_rows is None or previous != (rows, kept):
            # Slices of equal sizes have one layout, and with it what layers work out from it.
            previous, layout_of_rows = (rows, kept), among_all.select(rows).layout
        yield Microbatch(rows, Selection(layout_of_rows, index), places)
