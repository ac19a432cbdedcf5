"""`JaggedSequence`: tokens of a batch with layout and times; preprocessors make it, mixers pass it on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recsys.ops import Selection, SequenceLayout, gather_rows


@dataclass(frozen=True, eq=False)
class JaggedSequence:
    """T tokens of B samples, without padding.

    Attributes:
        values: [T, E].
        layout: where each sample's contextual, history and target tokens lie.
        timestamps: int64 [T], seconds; a contextual token has the request time of its row.
        next_timestamps: int64 [T], seconds, when the token after this one happens: the next event of the
            history, the request time for the last one and for contextual tokens, a target's own time for a
            target.
    """

    values: Tensor
    layout: SequenceLayout
    timestamps: Tensor
    next_timestamps: Tensor

    def with_values(self, values: Tensor) -> "JaggedSequence":
        """The same tokens after a layer: [T, E]."""
        return replace(self, values=values)

    def truncate(self, tail_len: int) -> "JaggedSequence":
        """The contextual tokens, the newest `tail_len` history tokens and all targets, each with its times.

        What follows a kept token is kept too, so `next_timestamps` stay true.
        """
        return self.take(self.layout.truncate(tail_len))

    def take(self, selection: Selection, values: Tensor | None = None) -> "JaggedSequence":
        """Some of the tokens, each with its times; `values`: what a layer has made of them already."""
        layout, index = selection
        values = gather_rows(self.values, index) if values is None else values
        times = [gather_rows(column, index) for column in (self.timestamps, self.next_timestamps)]
        return JaggedSequence(values, layout, *times)

    def split(self) -> list["JaggedSequence"]:
        """The sequences of each of `layout.parts`."""
        sizes = [part.total_len for part in self.layout.parts]
        columns = (self.values, self.timestamps, self.next_timestamps)
        values, timestamps, next_timestamps = (column.split(sizes) for column in columns)
        return list(map(JaggedSequence, values, self.layout.parts, timestamps, next_timestamps))

    def targets(self) -> Tensor:
        """[N, E], the target tokens of all samples, in the order of the candidates."""
        return gather_rows(self.values, self.layout.targets_only().index)

    def target_times(self) -> Tensor:
        """int64 [N], seconds: when the answer of each of `targets()` is wanted, its own request time."""
        return gather_rows(self.next_timestamps, self.layout.targets_only().index)

    def history(self) -> Tensor:
        """[U, E], the history tokens of all samples, in the order of the events."""
        return gather_rows(self.values, self.layout.history_only().index)

    def history_times(self) -> Tensor:
        """int64 [U], seconds: when what comes behind each of `history()` happens."""
        return gather_rows(self.next_timestamps, self.layout.history_only().index)


def join(sequences: Sequence[JaggedSequence]) -> JaggedSequence:
    """All sequences as one batch; `split` takes them apart again."""
    return JaggedSequence(
        torch.cat([one.values for one in sequences]),
        SequenceLayout.join([one.layout for one in sequences]),
        torch.cat([one.timestamps for one in sequences]),
        torch.cat([one.next_timestamps for one in sequences]),
    )


def following(values: Tensor, lengths: Tensor, last: Tensor) -> Tensor:
    """What comes after each entry of a jagged list.

    Args:
        values: [n], entries of B lists one after the other.
        lengths: int64 [B], adding up to n.
        last: [B], what follows the last entry of each list.

    Returns:
        [n]; nothing of one list appears in another.
    """
    count = values.shape[0]
    shifted = torch.cat([values, values.new_zeros(1)])[1:]
    own = torch.repeat_interleave(lengths, output_size=count)
    is_last = torch.arange(1, count + 1, device=values.device) == lengths.cumsum(0).index_select(0, own)
    return torch.where(is_last, last.index_select(0, own), shifted)
