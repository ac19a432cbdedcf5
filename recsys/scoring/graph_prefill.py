"""Prefill whose layers are the replay of a recorded CUDA graph: of a few users it costs what its work costs.

On a GPU Python takes several ms to start the kernels of a stack. Below some ten thousand tokens that is
longer than they run; with more it is still time that the host has for the batch behind.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor

from recsys.data.batch import Batch
from recsys.models.cached import RankerCache
from recsys.models.ranker import Ranker
from recsys.modules.cache import MixerCache
from recsys.modules.mixers import HstuMixer
from recsys.modules.precision import product_dtype
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout, offsets_from_lengths
from recsys.scoring.cuda_graph import WARM_UP, CudaGraph, Record, Replay, record_of, room_for
from recsys.scoring.static_buffers import CacheRoom, capacity_of

MOST_TOKENS = 1 << 18
"""More of them are bound by their work, and a graph keeps the memory that it needs."""

MOST_UNUSED = 4096
"""Tokens that are computed and belong to no sample."""

MOST_FORMS = 8
"""Forms whose graphs are kept, the latest used."""


class GraphPrefill:
    """`Ranker.prefill` into a room. Stacks with a truncation, whose sizes only the host knows, channels, long
    prefills and those for which there is no memory are started by Python.

    Args:
        model: in evaluation mode. Its weights may change in place.
        room: where caches lie.
        record: see `GraphScoring`.
    """

    def __init__(self, model: Ranker, room: CacheRoom, *, record: Record | None = None):
        self.model, self.room = model, room
        self._record = record
        self._forms: OrderedDict[tuple[int, ...], _Form] = OrderedDict()
        self._version = room.version
        self._pool: tuple[int, int] | None = None

    @property
    def num_graphs(self) -> int:
        """Graphs recorded and kept."""
        return sum(form.replay is not None for form in self._forms.values())

    def run(self, batch: Batch) -> RankerCache:
        """The cache of a batch's users, inside of the room until the next one; under `torch.no_grad()`."""
        mixer = self.model.caching_mixer()
        with self.model.autocast():
            sequence, prefix = self.model.encode_users(batch)
            replayed = self._replay(mixer, sequence) if isinstance(mixer, HstuMixer) else None
            self.room.begin()
            cache = mixer.prefill(sequence, self.room) if replayed is None else replayed
        return self.room.settle(RankerCache(prefix, cache))

    def _replay(self, mixer: HstuMixer, sequence: JaggedSequence) -> MixerCache | None:
        """What a graph has filled the room with; None where there is none for it."""
        layout = sequence.layout
        record = self._record_of(layout.device)
        truncated = any(rule.tail_len is not None for rule in mixer.rules)
        if record is None or truncated or layout.parts or layout.total_len > MOST_TOKENS:
            return None
        if self._version != self.room.version:
            self._drop(len(self._forms) if self.num_graphs else 0)
            self._version = self.room.version
        in_steps = -(-max(layout.total_len, 1) // MOST_UNUSED) * MOST_UNUSED
        size = min(capacity_of(layout.total_len), in_steps)
        longest = room_for(layout.max_len)
        key = (layout.batch_size, size, longest)
        self._forms.setdefault(key, _Form())
        self._forms.move_to_end(key)
        self._drop(len(self._forms) - MOST_FORMS)
        form = self._forms[key]
        form.runs += 1
        if form.runs <= WARM_UP:
            return None
        if form.replay is None:
            if not _fits(mixer, sequence.values, size):
                return None
            form.record(record, mixer, self.room, sequence, size, longest)
        form.fill(sequence)
        form.replay()
        ((stage,),) = form.filled.stacks
        return MixerCache(((stage.map(lambda tensor: tensor[: layout.total_len], layout),),))

    def _record_of(self, device: torch.device) -> Record | None:
        found = record_of(self._record, device, "hstu_attention")
        if found is not CudaGraph:
            return found
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return partial(
            CudaGraph, pool=self._pool
        )  # what they compute lies in the room before another one runs

    def _drop(self, count: int) -> None:
        if count > 0 and self.num_graphs and next(self.model.parameters()).is_cuda:
            torch.cuda.current_stream().synchronize()  # only what does not run may be destroyed
        for _ in range(count):
            self._forms.popitem(last=False)


def _fits(mixer: HstuMixer, like: Tensor, size: int) -> bool:
    """Whether the device has room for what a layer makes of so many tokens, and half of it is left."""
    if not like.is_cuda:
        return True
    layer = mixer.layers[0]
    width = sum(layer.widths) + layer.output.in_features + layer.widths[0] + 3 * like.shape[1]
    cached = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    free = torch.cuda.mem_get_info(like.device)[0] + cached  # a graph begins by handing back what is cached
    return 2 * size * width * product_dtype(like).itemsize <= free


class _Form:
    """Tensors that stay in place, and what reads them: for up to `size` tokens of B samples.

    Attributes:
        runs: how many prefills have asked for it.
        replay: fills the room; None until recorded.
        filled: where, for `size` tokens.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.replay: Replay | None = None
        self.filled: MixerCache = MixerCache(())

    def record(
        self,
        record: Record,
        mixer: HstuMixer,
        room: CacheRoom,
        like: JaggedSequence,
        size: int,
        longest: int,
    ) -> None:
        """Tokens behind those of the samples belong to none: they are computed, and nobody looks at them."""
        given, num_contextual = like.values, like.layout.num_contextual
        self.lengths = torch.zeros_like(like.layout.lengths)
        self.values = given.new_zeros(size, given.shape[1], dtype=product_dtype(given))
        self.times = self.lengths.new_zeros(2, size)
        lengths, values, times = self.lengths, self.values, self.times
        made: list[MixerCache] = []  # nothing that is recorded leads back to the form

        def run() -> Tensor:
            layout = SequenceLayout.trusted(
                lengths,
                offsets_from_lengths(lengths),
                torch.zeros_like(lengths),
                num_contextual,
                total_len=size,
                max_len=longest,
                total_targets=0,
            )
            room.begin()
            made[:] = [mixer.prefill(JaggedSequence(values, layout, *times), room)]
            return lengths

        self.fill(like)
        run()  # kernels for these sizes are compiled
        # What autocast rounds is rounded in the graph, each time.
        torch.clear_autocast_cache()
        self.replay = record(run)
        torch.clear_autocast_cache()
        self.filled = made[0]

    def fill(self, sequence: JaggedSequence) -> None:
        """Copies the tokens in, rounded as layers take them."""
        count = sequence.layout.total_len
        self.lengths.copy_(sequence.layout.lengths)
        self.values[:count].copy_(sequence.values)
        self.times[0, :count].copy_(sequence.timestamps)
        self.times[1, :count].copy_(sequence.next_timestamps)
