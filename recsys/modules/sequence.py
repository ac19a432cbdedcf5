"""`JaggedSequence`: the tokens of a batch with their layout and times, from preprocessors through mixers."""

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
        layout: layout of each sample's contextual, history and target tokens.
        timestamps: int64 [T], seconds; a contextual token has the request time of its row.
        next_timestamps: int64 [T], seconds; the time of the next token. For an event it is the time of the
            next event, for the last event and contextual tokens the request time, and for a target its own
            time.
    """

    values: Tensor
    layout: SequenceLayout
    timestamps: Tensor
    next_timestamps: Tensor

    def with_values(self, values: Tensor) -> "JaggedSequence":
        """Returns the same tokens with the values [T, E] that a layer computed."""
        return replace(self, values=values)

    def truncate(self, tail_len: int) -> "JaggedSequence":
        """Keeps contextual tokens, the newest `tail_len` history tokens and all targets, with their times.

        A token that follows a kept token is kept too, so `next_timestamps` stay valid.
        """
        return self.take(self.layout.truncate(tail_len))

    def take(self, selection: Selection, values: Tensor | None = None) -> "JaggedSequence":
        """Selects tokens with their times; `values` are the selected tokens' values, if already known."""
        layout, index = selection
        values = self._rows(self.values, index) if values is None else values
        times = [self._rows(column, index) for column in (self.timestamps, self.next_timestamps)]
        return JaggedSequence(values, layout, *times)

    def split(self) -> list["JaggedSequence"]:
        """Splits a joined sequence into the sequences of `layout.parts`."""
        sizes = [part.total_len for part in self.layout.parts]
        columns = (self.values, self.timestamps, self.next_timestamps)
        values, timestamps, next_timestamps = (column.split(sizes) for column in columns)
        return list(map(JaggedSequence, values, self.layout.parts, timestamps, next_timestamps))

    def targets(self) -> Tensor:
        """Returns the target tokens [N, E] of all samples, in the order of the candidates."""
        return self._rows(self.values, self.layout.targets_only().index)

    def target_times(self) -> Tensor:
        """Returns the request time of each of `targets()`, int64 [N], seconds."""
        return self._rows(self.next_timestamps, self.layout.targets_only().index)

    def history(self) -> Tensor:
        """Returns the history tokens [U, E] of all samples, in the order of the events."""
        return self._rows(self.values, self.layout.history_only().index)

    def history_times(self) -> Tensor:
        """Returns the time of the token after each of `history()`, int64 [U], seconds."""
        return self._rows(self.next_timestamps, self.layout.history_only().index)

    @staticmethod
    def _rows(column: Tensor, index: Tensor) -> Tensor:
        """Gathers selected tokens, all of which exist."""
        return gather_rows(column, index, complete=True)


def join(sequences: Sequence[JaggedSequence]) -> JaggedSequence:
    """Joins sequences into one batch; `JaggedSequence.split` is the reverse."""
    return JaggedSequence(
        torch.cat([sequence.values for sequence in sequences]),
        SequenceLayout.join([sequence.layout for sequence in sequences]),
        torch.cat([sequence.timestamps for sequence in sequences]),
        torch.cat([sequence.next_timestamps for sequence in sequences]),
    )


def following(values: Tensor, lengths: Tensor, last: Tensor) -> Tensor:
    """Returns the successor of each entry of a jagged list, [n].

    Args:
        values: [n], entries of B lists, one list after another.
        lengths: int64 [B], lengths of the lists, which add up to n.
        last: [B], the successor of the last entry of each list.
    """
    count = values.shape[0]
    shifted = torch.cat([values, values.new_zeros(1)])[1:]
    row = torch.repeat_interleave(lengths, output_size=count)
    is_last = torch.arange(1, count + 1, device=values.device) == lengths.cumsum(0).index_select(0, row)
    return torch.where(is_last, last.index_select(0, row), shifted)
