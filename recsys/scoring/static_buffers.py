"""Memory at one place for the cache at hand: what a recorded graph reads must lie where it lay."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from recsys.models.cached import RankerCache
from recsys.modules.cache import CacheStage, MixerCache, copy_rows
from recsys.ops import SequenceLayout, offsets_from_lengths


class CacheRoom:
    """Room for one cache at a time, as large as the largest so far and up to an eighth more.

    Attributes:
        version: another number once memory has moved; graphs that read the old one are void.
    """

    def __init__(self) -> None:
        self.version = 0
        self._buffers: list[Tensor] = []
        self._inside: RankerCache | None = None
        self._next = 0

    def begin(self) -> None:
        """Makes room for another cache, for whose tensors `keep` and `place` are. What was inside is gone."""
        self._inside, self._next = None, 0

    def keep(self, tensor: Tensor) -> Tensor:
        """Copies the next tensor in; see `recsys.modules.cache.Memory`."""
        return copy_rows(tensor, self.place(tuple(tensor.shape), tensor.dtype, tensor.device))

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the next tensor, for somebody else to fill."""
        number, size = self._next, shape[0]
        self._next += 1
        old = self._buffers[number] if number < len(self._buffers) else None
        if old is None or old.shape[0] < size or not _is_like(old, shape, dtype, device):
            # Zeros: rows that nobody writes are read, and what comes of them is thrown away.
            buffer = torch.zeros(capacity_of(size), *shape[1:], dtype=dtype, device=device)
            self._buffers[number : number + 1] = [buffer]
            self.version += 1
        return self._buffers[number][:size]

    def settle(self, cache: RankerCache) -> RankerCache:
        """Ends what `begin` began: `cache` has the tensors that came of it."""
        self._inside = cache
        return cache

    def take(self, cache: RankerCache) -> RankerCache:
        """Copies a cache in, unless it is inside already; returns the one inside.

        Raises:
            ValueError: it was inside, and another one has taken its place.
        """
        if cache is self._inside:
            return cache
        mine = {buffer.untyped_storage().data_ptr() for buffer in self._buffers}
        tensors = (tensor for stage in _stages(cache) for tensor in stage.tensors)
        if any(tensor.untyped_storage().data_ptr() in mine for tensor in tensors if len(tensor)):
            raise ValueError(
                "a later prefill has taken the place of this cache: score its candidates first, or keep a "
                "copy of it (`cache.select(range(cache.batch_size))`)"
            )
        self.begin()
        stacks = tuple(tuple(map(self._copy, stack)) for stack in cache.mixer.stacks)
        return self.settle(RankerCache(cache.prefix, MixerCache(stacks)))

    def _copy(self, stage: CacheStage) -> CacheStage:
        times = None if stage.timestamps is None else self.keep(stage.timestamps)
        copy = CacheStage(stage.layout, times)
        for pair in zip(stage.keys, stage.values, strict=True):
            copy = copy.with_layer(*map(self.keep, pair))
        return copy

    def whole(self, cache: RankerCache, lengths: Tensor, longest: int) -> MixerCache:
        """The memory as a cache of the form of the one inside, which says nothing of how full it is.

        Args:
            cache: of that form; its sizes are not looked at.
            lengths: int64 [samples of all stages], of the cache inside, wherever graphs read them.
            longest: no sample is longer.
        """
        buffers = {buffer.untyped_storage().data_ptr(): buffer for buffer in self._buffers}
        own = iter(lengths.split([stage.layout.batch_size for stage in _stages(cache)]))
        return MixerCache(
            tuple(
                tuple(_whole_stage(stage, buffers, next(own), longest) for stage in stack)
                for stack in cache.mixer.stacks
            )
        )


def lengths_of(cache: RankerCache) -> list[Tensor]:
    """int64 [samples] of each stage."""
    return [stage.layout.lengths for stage in _stages(cache)]


def longest_of(cache: RankerCache) -> int:
    """No sample of any stage is longer."""
    return max((stage.layout.max_len for stage in _stages(cache)), default=0)


def _stages(cache: RankerCache) -> Iterator[CacheStage]:
    return (stage for stack in cache.mixer.stacks for stage in stack)


def _whole_stage(
    stage: CacheStage, buffers: Mapping[int, Tensor], lengths: Tensor, longest: int
) -> CacheStage:
    def whole(tensor: Tensor) -> Tensor:
        buffer = buffers[tensor.untyped_storage().data_ptr()]
        shape = (buffer.shape[0], *tensor.shape[1:])
        return buffer.as_strided(shape, tensor.stride(), tensor.storage_offset())

    layout = SequenceLayout.trusted(
        lengths,
        offsets_from_lengths(lengths),
        torch.zeros_like(lengths),
        stage.layout.num_contextual,
        total_len=min(whole(key).shape[0] for key in stage.keys),
        max_len=longest,
        total_targets=0,
    )
    return stage.map(lambda tensor: whole(tensor)[: layout.total_len], layout)


def _is_like(old: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return old.shape[1:] == shape[1:] and old.dtype == dtype and old.device == device


def capacity_of(rows: int) -> int:
    """`rows`, rounded up to eighths of a power of two."""
    step = max(1 << max(rows - 1, 1).bit_length() >> 3, 1)
    return -(-max(rows, 1) // step) * step
