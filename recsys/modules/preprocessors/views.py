"""Describes the sequences of a batch as views of encoded rows: by the indices and times of these rows.

Encoded rows are numbered in the order [contextual tokens of all rows | first tokens of all events | second
tokens, if an event has two | candidates]. A batch without channels has one view of all encoded rows; with
channels, each channel has its own view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recsys.data.batch import Batch
from recsys.modules.sequence import following
from recsys.ops import SequenceLayout
from recsys.ops.runtime import triton_support


@dataclass(frozen=True, eq=False)
class View:
    """The sequences of all rows, T tokens in all.

    Attributes:
        index: int64 [T], the encoded row of each token; all are different.
        times: int64 [T, 3], seconds: the times of the token, of the next token, and of the request.
        inverse: int64 [encoded rows], the token of each encoded row; None if it has not been computed.
    """

    index: Tensor
    times: Tensor
    inverse: Tensor | None = None


def views(batch: Batch, tokens_per_event: int) -> list[View]:
    """Returns one view per channel, or a single view if the batch has no channels."""
    if batch.channel_layout is None:
        return [_of_all(batch, tokens_per_event)]
    if not triton_support.has_kernels(batch.channel_layout.device):
        return _of_channels(batch, batch.channel_layout, tokens_per_event)
    parts = zip(batch.channel_layout.parts, batch.channel_events, strict=True)
    return [_of_channel(batch, layout, name, tokens_per_event) for layout, name in parts]


def _of_all(batch: Batch, tokens_per_event: int) -> View:
    index, inverse = batch.layout.assemble_index(), batch.layout.disassemble_index()
    times = _times(batch, batch.layout, batch.uih_timestamps, batch.uih_lengths, tokens_per_event)
    if tokens_per_event == 1:
        return View(index, times, inverse)
    count = batch.uih_timestamps.shape[0]
    rows = _rows(batch, torch.arange(count, device=index.device), tokens_per_event)
    sizes = [batch.layout.num_contextual * batch.layout.batch_size, count * tokens_per_event]
    prefix, tokens, targets = inverse.split([*sizes, batch.candidate_timestamps.shape[0]])
    event_tokens = tokens.view(count, tokens_per_event).unbind(1)
    return View(rows.index_select(0, index), times, torch.cat([prefix, *event_tokens, targets]))


def _of_channels(batch: Batch, layout: SequenceLayout, tokens_per_event: int) -> list[View]:
    """Describes all channels at once, which takes a third of the operations of three channels."""
    count = len(layout.parts)
    events = torch.cat([batch.channel_events[name] for name in batch.channel_events])
    lengths = torch.cat([batch.channel_lengths[name] for name in batch.channel_events])
    event_times = batch.uih_timestamps.index_select(0, events)
    times = _times(batch, layout, event_times, lengths, tokens_per_event, count)
    rows = _rows(batch, events, tokens_per_event, count)
    sizes = [part.total_len for part in layout.parts]
    columns = (rows.index_select(0, layout.assemble_index()).split(sizes), times.split(sizes))
    return list(map(View, *columns))


def _of_channel(batch: Batch, layout: SequenceLayout, name: str, tokens_per_event: int) -> View:
    events, lengths = batch.channel_events[name], batch.channel_lengths[name]
    index = layout.assemble_index()
    event_times = batch.uih_timestamps.index_select(0, events)
    times = _times(batch, layout, event_times, lengths, tokens_per_event)
    rows = _rows(batch, events, tokens_per_event)
    return View(rows.index_select(0, index), times)


def _rows(batch: Batch, events: Tensor, tokens_per_event: int, count: int = 1) -> Tensor:
    """Returns the numbers of encoded rows, int64: all contextual tokens, the given events, all candidates.

    The tokens of an event follow each other. Contextual tokens and candidates come `count` times.
    """
    first, num_events = batch.layout.num_contextual * batch.layout.batch_size, batch.uih_timestamps.shape[0]
    last = first + num_events * tokens_per_event
    num_candidates = batch.candidate_timestamps.shape[0]
    within = torch.arange(tokens_per_event, device=events.device)
    history = (events[:, None] + within * num_events).flatten()
    prefix = torch.arange(first, device=events.device)
    candidates = last + torch.arange(num_candidates, device=events.device)
    return torch.cat([*[prefix] * count, first + history, *[candidates] * count])


def _times(
    batch: Batch,
    layout: SequenceLayout,
    events: Tensor,
    lengths: Tensor,
    tokens_per_event: int,
    count: int = 1,
) -> Tensor:
    """Returns the times of each token, of the next token and of the request, int64 [T, 3], seconds.

    Args:
        layout: layout of the tokens.
        events: int64 [n], times of the events.
        lengths: int64 [count * B], number of events of each row.
        count: number of times that the rows and the candidates of the batch come in `layout`.
    """
    request = batch.request_time if count == 1 else torch.cat([batch.request_time] * count)
    if triton_support.has_kernels(layout.device):
        kernels = triton_support.load("recsys.modules.token_kernels")
        return kernels.times_of(layout, request, events, batch.candidate_timestamps, tokens_per_event)
    contextual = request[:, None].expand(-1, batch.layout.num_contextual).flatten()
    after = following(events, lengths, last=request)
    asked = torch.repeat_interleave(request, lengths, output_size=events.shape[0])
    history = torch.stack([events, after, asked], dim=1)
    if tokens_per_event == 2:
        # The content token of an event is followed by its action token, at the same time.
        history = torch.stack([events, events, asked, events, after, asked], dim=1).view(-1, 3)
    candidates = batch.candidate_timestamps[:, None].expand(-1, 3)
    rows = torch.cat([contextual[:, None].expand(-1, 3), history, *[candidates] * count])
    return rows.index_select(0, layout.assemble_index())
