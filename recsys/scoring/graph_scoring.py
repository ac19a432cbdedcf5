"""Scoring with a cache whose pieces are replays of recorded CUDA graphs: a piece costs what its work costs.

A piece of a few hundred candidates keeps a GPU busy for less time than Python takes to start its kernels. All
pieces of a form run the same kernels, so they are recorded once and started with one call. What differs from
piece to piece and from batch to batch lies in tensors that stay in place: candidates, how many each row has,
the cache and its lengths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.data.batch import Batch
from recsys.models.cached import RankerCache
from recsys.models.ranker import Ranker
from recsys.modules.cache import MixerCache
from recsys.modules.precision import product_dtype
from recsys.modules.relative_bias import RelativeBiasTables
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout, offsets_from_lengths
from recsys.scoring.cuda_graph import WARM_UP, Record, Replay, record_of, room_for
from recsys.scoring.graph_prefill import GraphPrefill
from recsys.scoring.static_buffers import CacheRoom, lengths_of, longest_of

MOST_FORMS = 8
"""Forms whose graphs are kept, the latest used."""

MOST_ROWS = 1 << 17
"""Candidates whose scores are made of mixed tokens at a time: large tensors are worked on faster than many
small ones, and a bound is needed."""


class GraphScoring:
    """`Ranker.score_in_microbatches` for one model and one caller at a time.

    Args:
        model: in evaluation mode. Its weights may change in place from one `score` to the next.
        size: candidates of a row that are scored together; rounded down to whole target groups, to at least
            one.
        record: None for CUDA graphs on CUDA, unless attention is the reference's; else nothing is recorded.
        record_prefill: whether the layers of short prefills are recorded too, see `GraphPrefill`.
    """

    def __init__(
        self, model: Ranker, size: int, *, record: Record | None = None, record_prefill: bool = True
    ):
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        group_size = model.caching_mixer().target_group_size
        self.model, self.size = model, max(size // group_size, 1) * group_size
        self.room = CacheRoom()
        self._prefill = GraphPrefill(model, self.room, record=record) if record_prefill else None
        self._layers = _Layers(model)
        self._record = record
        self._forms: OrderedDict[tuple[int, ...], _Form] = OrderedDict()
        self._version = 0

    @property
    def num_graphs(self) -> int:
        """Graphs recorded and kept."""
        prefills = 0 if self._prefill is None else self._prefill.num_graphs
        return prefills + sum(form.num_graphs for form in self._forms.values())

    @torch.no_grad()
    def prefill(self, batch: Batch) -> RankerCache:
        """`Ranker.prefill`; the cache is good for `score` until the next one."""
        if self._prefill is not None:
            return self._prefill.run(batch)
        self.room.begin()
        return self.room.settle(self.model.prefill(batch, self.room))

    @torch.no_grad()
    def score(self, batch: Batch, cache: RankerCache) -> Tensor:
        """float32 [N, tasks], of a batch whose users and histories are in the cache.

        Args:
            batch: row b has the candidates of user b of the cache, any number; how many is known on the host.
            cache: that of `prefill`, or any other one, which is copied.

        Raises:
            ValueError: a cache of an earlier `prefill`; another number of rows.
        """
        cache = self.room.take(cache)
        if self._version != self.room.version:
            _wait_for(self._forms.values())
            self._forms.clear()
            self._version = self.room.version
        with self.model.autocast():
            encoded = self.model.encode_candidates(batch, cache)
            sequence, candidates = encoded.sequence, encoded.candidates
            layout = sequence.layout.parts[0] if sequence.layout.parts else sequence.layout
            pieces = _cut(layout, self.size)
            if not pieces.counts:
                return self.model.score_encoded(sequence, candidates, cache.mixer)
            mixed = self._mix(pieces, sequence, cache)
            given = (mixed, sequence.next_timestamps[: len(mixed)], candidates)
            rows = zip(*(column.split(MOST_ROWS) for column in given), strict=True)
            return torch.cat([self.model.score_mixed(*some) for some in rows])

    def _mix(self, pieces: _Pieces, sequence: JaggedSequence, cache: RankerCache) -> Tensor:
        """[N, E], the targets behind the mixer, in the order of the candidates."""
        channels = max(len(sequence.layout.parts), 1)
        values = pieces.arrange(sequence.values.unflatten(0, (channels, -1)), product_dtype(sequence.values))
        times = None
        if self._layers.reads_times:
            times = pieces.arrange(sequence.timestamps.unflatten(0, (channels, -1)), torch.int64)
        mixed, before, filled = None, None, set()
        stops = accumulate(pieces.counts)
        for number, (count, stop) in enumerate(zip(pieces.counts, stops, strict=True)):
            form = self._form(cache, room_for(count), values)
            if form not in filled:
                torch.cat(lengths_of(cache), out=form.cached)
                filled.add(form)
            fresh = before is None or before[0] is not form or before[1] != pieces.same_as[number]
            if fresh:
                form.fill(pieces.kept[number], count)
            before = (form, pieces.same_as[number])
            own = slice(stop - count, stop)
            form.values[:, :count].copy_(values[:, own])
            if times is not None:
                form.times[:, :count].copy_(times[:, own])
            found = form.run(fresh, self._record)[:count]
            mixed = found.new_empty(values.shape[1], found.shape[1]) if mixed is None else mixed
            mixed[own].copy_(found)
        return pieces.restore(mixed, sequence.values.dtype)

    def _form(self, cache: RankerCache, count: int, values: Tensor) -> _Form:
        longest = room_for(longest_of(cache))
        key = (cache.batch_size, count, longest)
        if key not in self._forms:
            cached = torch.cat(lengths_of(cache))
            self._forms[key] = _Form(
                self._layers,
                values.new_zeros(values.shape[0], count, values.shape[-1]),
                torch.zeros(values.shape[0], count, dtype=torch.int64, device=values.device),
                torch.zeros(cache.batch_size, dtype=torch.int64, device=values.device),
                cached,
                partial(self.room.whole, cache, cached, longest),
            )
            if len(self._forms) > MOST_FORMS:
                _wait_for(self._forms.values())
                self._forms.popitem(last=False)
        self._forms.move_to_end(key)
        return self._forms[key]


class _Pieces(NamedTuple):
    """All candidates, piece by piece.

    Attributes:
        order: int64 [N], which candidate stands where; None where all rows have as many in each piece.
        counts: candidates of each piece.
        kept: int64 [pieces, B], of each row.
        same_as: of each piece the first one with the same `kept`.
    """

    order: Tensor | None
    counts: list[int]
    kept: Tensor
    same_as: list[int]

    def arrange(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """[channels, N, ...] piece by piece, in memory of its own."""
        if self.order is not None:
            return tensor.index_select(1, self.order).to(dtype)
        num_pieces, rows = self.kept.shape
        return _copied(tensor.unflatten(1, (rows, num_pieces, -1)).transpose(1, 2), dtype).flatten(1, 3)

    def restore(self, found: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, E] in the order of the candidates, from that of `arrange`."""
        if self.order is not None:
            found = found.to(dtype)
            return torch.empty_like(found).index_copy_(0, self.order, found)
        num_pieces, rows = self.kept.shape
        return _copied(found.unflatten(0, (num_pieces, rows, -1)).transpose(0, 1), dtype).flatten(0, 2)


def _cut(layout: SequenceLayout, size: int) -> _Pieces:
    """The next `size` targets of every row that has some left, again and again.

    Raises:
        ValueError: the lengths are on a device only.
    """
    host = layout.on_host().num_targets
    longest = int(host.max()) if len(host) else 0
    starts = range(0, longest, size)
    by_piece = [(host - start).clamp(0, size) for start in starts]
    same_as: list[int] = []
    for number, own in enumerate(by_piece):
        as_before = number > 0 and bool(torch.equal(own, by_piece[number - 1]))
        same_as.append(same_as[-1] if as_before else number)
    order = None
    if not all(bool((own == own[0]).all()) for own in by_piece) or (len(by_piece) > 1 and longest % size):
        place = layout.targets_only().layout.positions()
        order = torch.argsort(place // size, stable=True)
    first = torch.arange(0, longest, size, device=layout.device).unsqueeze(1)
    kept = (layout.num_targets - first).clamp(0, size)
    return _Pieces(order, [int(own.sum()) for own in by_piece], kept, same_as)


def _wait_for(forms: Iterable[_Form]) -> None:
    """Until no graph of theirs runs: only then one may be destroyed. Seldom, since forms are."""
    if any(form.num_graphs and form.kept.is_cuda for form in forms):
        torch.cuda.current_stream().synchronize()


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and of another type, in one step."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


@dataclass(eq=False)
class _Form:
    """Tensors that stay in place, and what reads them: for pieces of up to n candidates of B rows.

    Attributes:
        values: [channels, n, E], target tokens. times: int64 [channels, n]; zeros where nobody reads them.
        kept: int64 [B], candidates of each row. They add up to n: where a piece has fewer, the last row has
            old ones behind its own, which nobody looks at.
        cached: int64 [samples of all stages], tokens of each.
        whole: makes the cache of the room's memory and `cached`. Nothing here leads back to the form: it must
            go when it is dropped, not when garbage is collected, which may be while a graph is recorded.
    """

    layers: _Layers
    values: Tensor
    times: Tensor
    kept: Tensor
    cached: Tensor
    whole: Callable[[], MixerCache]

    def __post_init__(self) -> None:
        self._layout: SequenceLayout | None = None
        self._cache: MixerCache | None = None
        self._graphs: tuple[Replay, Replay] | None = None
        self._runs = 0

    @property
    def num_graphs(self) -> int:
        """Recorded ones."""
        return 0 if self._graphs is None else len(self._graphs)

    def fill(self, kept: Tensor, count: int) -> None:
        """How many candidates each row has, `count` in all."""
        self.kept.copy_(kept)
        if count < self.values.shape[1]:
            self.kept[-1:] += self.values.shape[1] - count

    def run(self, fresh: bool, record: Record | None) -> Tensor:
        """[n, E], until the next run.

        Args:
            fresh: `kept` or `cached` is not what it was.
        """
        self._runs += 1
        record = record_of(record, self.values.device, "hstu_attention_cached")
        if self._graphs is None and self._runs > WARM_UP and record is not None:
            self._graphs = self._recorded(record)
            fresh = True
        if self._graphs is None:
            return self._first() if fresh else self._again()
        return self._graphs[0 if fresh else 1]()

    def _recorded(self, record: Record) -> tuple[Replay, Replay]:
        # What autocast rounds is rounded in the first graph, and the second one finds it. It must not be what
        # somebody outside has rounded, nor may anybody else find it.
        torch.clear_autocast_cache()
        first, again = record(self._first), record(self._again)
        torch.clear_autocast_cache()
        return first, again

    def _first(self) -> Tensor:
        """Of a piece whose layouts are new: what layers work out from them is kept in them."""
        count = self.values.shape[1]
        parts = [
            SequenceLayout.trusted(
                self.kept, offsets_from_lengths(self.kept), self.kept, 0, count, count, count
            )
            for _ in range(self.values.shape[0])
        ]
        self._layout = SequenceLayout.join(parts) if len(parts) > 1 else parts[0]
        self._cache = self.whole()
        self.layers.round_weights()
        return self._again()

    def _again(self) -> Tensor:
        times = self.times.flatten()
        sequence = JaggedSequence(self.values.flatten(0, 1), self._layout, times, times)
        return self.layers.mix(sequence, self._cache)


class _Layers(nn.Module):
    """The mixer with weights of linear layers that have been rounded before: else each of many small pieces
    would round them.
    """

    def __init__(self, model: Ranker):
        super().__init__()
        self.mixer = model.caching_mixer()
        self.reads_times = any(isinstance(part, RelativeBiasTables) for part in self.mixer.modules())
        compiled = any(getattr(module, "compiled", False) for module in self.mixer.modules())
        self._rounded: dict[str, Tensor] = {}
        self._exact: list[Tensor] = []
        if model.precision != pb.BF16 or compiled:  # what is compiled is so for its own parameters
            return
        for name, module in self.mixer.named_modules(prefix="mixer"):
            if isinstance(module, nn.Linear):
                for kind, parameter in module.named_parameters(prefix=name, recurse=False):
                    self._exact.append(parameter)
                    self._rounded[kind] = parameter.detach().to(torch.bfloat16)

    def round_weights(self) -> None:
        """As they are now."""
        if self._exact:
            torch._foreach_copy_(list(self._rounded.values()), [one.detach() for one in self._exact])

    def forward(self, sequence: JaggedSequence, cache: MixerCache) -> Tensor:
        """[n, E]."""
        return self.mixer.score(sequence, cache).values

    def mix(self, sequence: JaggedSequence, cache: MixerCache) -> Tensor:
        """`forward` with the weights of `round_weights`."""
        return torch.func.functional_call(self, self._rounded, (sequence, cache))
