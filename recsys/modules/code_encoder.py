"""`CodeEncoder`: reads a history with a token for each code, so that a decoder can attend to all of them.

After Rajput et al., "Recommender Systems with Generative Retrieval" (TIGER, arXiv 2305.05065), with three
differences: blocks are those of `CodeDecoder`, positions are learned and count events from the newest one,
and there is no token for the user.

Every code sees all others, so an encoding that is to predict an event must end before it. `prefixes_of` cuts
the histories of a batch: each event that is to be predicted gets the events before it as a sample of its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.modules.flops import linear_flops
from recsys.ops import SequenceLayout, cross_attention, gather_rows


class EncodedCodes(NamedTuple):
    """Encoded histories, one start token and a token for each code.

    Attributes:
        values: [T, E].
        layout: the layout of B samples; the start token is contextual.
    """

    values: Tensor
    layout: SequenceLayout

    def part(self, start: int, stop: int) -> "EncodedCodes":
        """Returns samples `start` to `stop` - 1; without lengths on the host it waits for the device."""
        layout, index = self.layout.select(range(start, stop))
        return EncodedCodes(gather_rows(self.values, index), layout)


class Prefixes(NamedTuple):
    """Beginnings of histories, one for each event that is to be predicted.

    Attributes:
        layout: the layout of M samples whose tokens are N events in all, at least one in each.
        events: int64 [N], the place of each among the U events of the batch.
        last: int64 [M], the place of the last event of each sample.
    """

    layout: SequenceLayout
    events: Tensor
    last: Tensor


def prefixes_of(layout: SequenceLayout, most: int | None, *, draw: bool) -> Prefixes:
    """Cuts histories before the events that are to be predicted, which no first event is.

    Numbers are drawn from PyTorch's generator on the host, whose state checkpoints keep, so nothing waits for
    a device.

    Args:
        layout: histories of U events, whose lengths are on the host.
        most: the most prefixes of a row; None for all.
        draw: whether to draw them at random; else the longest ones are taken.
    """
    host = layout.on_host()
    counts = (host.lengths - 1).clamp(min=0)
    row = torch.repeat_interleave(counts)
    # An event in its row, from 0: the last one of a prefix.
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    if most is not None:
        order = (torch.rand(len(row)) if draw else -place).argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        # Rows keep their entries, so the entry at `order[i]` is number `place[i]` of its row in this order.
        kept = order[place < most].sort().values
        row, place = row[kept], place[kept]
    first = host.offsets[:-1][row]
    cut = SequenceLayout(place + 1).to(layout.device, non_blocking=True)
    ends = torch.stack([first, first + place]).to(layout.device, non_blocking=True)
    return Prefixes(cut, ends[0].index_select(0, cut.sample_ids()) + cut.positions(), ends[1])


class EncoderBlock(nn.Module):
    """Attention among all tokens of a sample, then a feed-forward layer; each has a norm and a residual."""

    def __init__(self, config: pb.CodeEncoder, width: int):
        super().__init__()
        self.heads, self.head_dim = config.num_heads, head_dim_of(config, width)
        inner = self.heads * self.head_dim
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * inner)
        self.output = nn.Linear(inner, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, config.ff_dim), nn.GELU(), nn.Linear(config.ff_dim, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, layout: SequenceLayout) -> Tensor:
        """Maps [T, E] to [T, E]."""
        qkv = self.query_key_value(self.norm(x)).unflatten(1, (3, self.heads, self.head_dim))
        mixed = cross_attention(*qkv.unbind(1), layout, layout)
        x = x + self.dropout(self.output(mixed.flatten(1)))
        return x + self.dropout(self.feed_forward(x))


class CodeEncoder(nn.Module):
    """A transformer over the embeddings of the codes of a history.

    Args:
        config: the message.
        levels: number of codes of an item.
        width: E.
        max_events: the most events of a row; older ones share a position.
        init_std: standard deviation of the position embeddings at the start.
    """

    def __init__(self, config: pb.CodeEncoder, levels: int, width: int, max_events: int, init_std: float):
        super().__init__()
        self.levels, self.width = levels, width
        self.inner = config.num_heads * head_dim_of(config, width)
        self.targets_per_row = config.targets_per_row if config.HasField("targets_per_row") else None
        self.start = nn.Parameter(torch.zeros(1, width))
        self.positions = nn.Embedding(max_events, width)
        nn.init.normal_(self.positions.weight, std=init_std)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(config, width) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, codes: Tensor, layout: SequenceLayout) -> EncodedCodes:
        """Encodes histories. A history without events has its start token alone.

        Args:
            codes: [N, levels, E], the embeddings of the codes of all events.
            layout: the layout of the events over B samples.
        """
        age = layout.lengths.index_select(0, layout.sample_ids()) - 1 - layout.positions()
        # No age is below 0. That bound is for the compiler of packages, which times kernels on made-up
        # lengths.
        age = age.clamp(min=0, max=self.positions.num_embeddings - 1)
        codes = codes + self.positions(age)[:, None]
        tokens = layout.widen(self.levels)
        x = torch.cat([self.start.expand(layout.batch_size, -1), codes.flatten(0, 1)])
        x = self.dropout(gather_rows(x, tokens.assemble_index(), tokens.disassemble_index()))
        for block in self.blocks:
            x = block(x, tokens)
        return EncodedCodes(self.norm(x), tokens)

    def prefixes(self, layout: SequenceLayout) -> Prefixes:
        """Returns the prefixes from which a batch is predicted: drawn in training, else the longest ones."""
        return prefixes_of(layout, self.targets_per_row, draw=self.training)

    def cost(self, layout: SequenceLayout) -> "EncoderCost":
        """Returns the cost of encoding the prefixes of a batch, the mean over those that may be drawn."""
        events = layout.on_host().lengths.double()
        choices = (events - 1).clamp(min=0)
        kept = choices if self.targets_per_row is None else choices.clamp(max=self.targets_per_row)
        share = kept / choices.clamp(min=1)
        # Sums of c and of c^2 over all prefixes of c events.
        sums, squares = choices * events / 2, choices * events * (2 * events - 1) / 6
        tokens = int((share * (self.levels * sums + choices)).sum())
        pairs = int((share * (self.levels**2 * squares + 2 * self.levels * sums + choices)).sum())
        flops = linear_flops(self.blocks, tokens) + 4 * pairs * self.inner * len(self.blocks)
        return EncoderCost(int(kept.sum()), tokens, flops)


class EncoderCost(NamedTuple):
    """The number of prefixes, of their tokens, and the FLOP of encoding them."""

    prefixes: int
    tokens: int
    flops: int


def head_dim_of(config: pb.CodeEncoder | pb.CodeDecoder, width: int) -> int:
    """Returns the width of a head."""
    return config.head_dim if config.HasField("head_dim") else width // config.num_heads
