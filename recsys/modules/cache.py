"""Caches as values: what layers keep of contextual and history tokens, so that targets are scored alone.

A mixer's `prefill` returns one, `score` reads it, `extend` returns another one. No module keeps any of it: a
cache can be stored, moved to the host and back, cut into samples and thrown away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from recsys.modules.sequence import JaggedSequence
from recsys.ops import Selection, SequenceLayout, gather_rows


class Memory(Protocol):
    """Where a cache's tensors come to lie: of each stage times, if there are any, then what layers make."""

    def keep(self, tensor: Tensor) -> Tensor:
        """An equal one that stays, of one that may be a view of something larger, [T, ...]."""
        ...

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What stays, contiguous, for a layer to make its keys and values in, among others: more memory than
        these alone, and no copies. None to be asked to `keep` each of them.
        """
        ...


WORD = torch.complex128
"""Of a copy."""


def copied(tensor: Tensor) -> Tensor:
    """A tensor of its own: a view would keep all that was computed together."""
    if torch.compiler.is_compiling():
        return tensor.clone(memory_format=torch.contiguous_format)
    return copy_rows(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))


class OwnMemory:
    """Tensors of their own, for each cache."""

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return copied(tensor)

    def place(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """A cache may be kept for long: no more memory than it needs."""


OWN: Memory = OwnMemory()


def copy_rows(source: Tensor, target: Tensor) -> Tensor:
    """`target.copy_(source)`, [T, ...], a word of 16 bytes at a time where rows are made of such: narrow
    numbers of scattered rows are copied one by one.
    """
    pair = [tensor.flatten(1) if tensor.dim() > 2 else tensor for tensor in (source, target)]
    if all(one.dim() == 2 and one.stride(1) == 1 for one in pair):
        numbers = max(WORD.itemsize // source.element_size(), 1)
        sizes = [size for one in pair for size in (one.shape[1], one.stride(0), one.storage_offset())]
        if not any(size % numbers for size in sizes):
            pair = [one.view(WORD) for one in pair]
    pair[1].copy_(pair[0])
    return target


@dataclass(frozen=True, eq=False)
class CacheStage:
    """Neighbouring layers that see the same tokens: all of a stack, or those up to the next truncation.

    Attributes:
        layout: contextual and history tokens of each sample, T in all, no targets. Stacks that run in step
            have the samples of each after the other; `layout.parts` are theirs.
        timestamps: int64 [T], seconds; None where no bias looks at times.
        keys: [T, H, D] of each layer.
        values: [T, H, V] of each layer.
    """

    layout: SequenceLayout
    timestamps: Tensor | None
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def with_layer(self, k: Tensor, v: Tensor) -> "CacheStage":
        """One more layer."""
        return CacheStage(self.layout, self.timestamps, (*self.keys, k), (*self.values, v))

    def append(self, other: "CacheStage") -> "CacheStage":
        """Each sample's tokens with those of `other` behind them, which are history; same layers."""
        layout, index = _behind(self.layout, other.layout)
        old, new = self.tensors, other.tensors
        joined = iter([gather_rows(pair, index) for pair in zip(old, new, strict=True)])
        return self.map(lambda _: next(joined), layout)

    def truncate(self, tail_len: int) -> "CacheStage":
        """The contextual tokens and the newest `tail_len` history tokens."""
        layout, index = self.layout.truncate(tail_len)
        return self.map(lambda tensor: gather_rows(tensor, index), layout)

    def map(self, change: Callable[[Tensor], Tensor], layout: SequenceLayout) -> "CacheStage":
        """All `tensors`, in their order, changed alike, under another layout."""
        return CacheStage(
            layout,
            None if self.timestamps is None else change(self.timestamps),
            tuple(map(change, self.keys)),
            tuple(map(change, self.values)),
        )

    def select(self, samples: Sequence[int]) -> "CacheStage":
        """The tokens of some samples; see `SequenceLayout.select`."""
        layout, index = self.layout.select(samples)
        return self.map(lambda tensor: tensor.index_select(0, index), layout)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "CacheStage":
        """A copy on a device."""
        move = self.layout.to(device, non_blocking)
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking), move)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of tokens."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Times if there are any, keys of each layer, values of each layer."""
        times = () if self.timestamps is None else (self.timestamps,)
        return (*times, *self.keys, *self.values)


@dataclass(frozen=True, eq=False)
class MixerCache:
    """What a mixer keeps of B samples.

    Attributes:
        stacks: the stages of each stack of layers, or of several that run in step.
    """

    stacks: tuple[tuple[CacheStage, ...], ...]

    def select(self, samples: Sequence[int]) -> "MixerCache":
        """Some samples in this order, each as often as it is named; a copy."""
        return self._map(lambda stage: stage.select(samples))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MixerCache":
        """A copy on a device."""
        return self._map(lambda stage: stage.to(device, non_blocking))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors of tokens."""
        return sum(stage.num_bytes for stack in self.stacks for stage in stack)

    def _map(self, change: Callable[[CacheStage], CacheStage]) -> "MixerCache":
        return MixerCache(tuple(tuple(map(change, stack)) for stack in self.stacks))


@runtime_checkable
class CachingMixer(Protocol):
    """A mixer that can score with a cache."""

    @property
    def target_group_size(self) -> int:
        """Neighbouring targets that are scored together or not at all."""
        ...

    def prefill(self, sequence: JaggedSequence, memory: Memory = OWN) -> MixerCache:
        """What targets will look at of contextual and history tokens."""
        ...

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixed targets."""
        ...

    def extend(self, sequence: JaggedSequence, cache: MixerCache) -> MixerCache:
        """The cache of histories with these tokens behind."""
        ...


@dataclass(frozen=True, eq=False)
class Prefix:
    """What encoders of candidates and of later events must know of the tokens in front of them.

    Attributes:
        lengths: int64 [channels, B], contextual and history tokens of each row; one channel when there are
            none.
        num_contextual: contextual tokens among them.
        users: float32 [B, C], the concatenated USER features, where encoders make weights of them; else None.
    """

    lengths: Tensor
    num_contextual: int
    users: Tensor | None

    @classmethod
    def of(cls, layout: SequenceLayout, users: Tensor | None) -> "Prefix":
        """That of sequences without targets, those of all channels joined."""
        lengths = torch.stack([part.lengths for part in layout.parts or (layout,)])
        return cls(lengths, layout.num_contextual, users)

    def select(self, rows: Sequence[int]) -> "Prefix":
        """Some rows in this order, each as often as it is named."""
        index = torch.tensor(rows, dtype=torch.int64).to(self.lengths.device, non_blocking=True)
        users = None if self.users is None else self.users.index_select(0, index)
        return Prefix(self.lengths.index_select(1, index), self.num_contextual, users)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Prefix":
        """A copy on a device."""
        users = None if self.users is None else self.users.to(device, non_blocking=non_blocking)
        return Prefix(self.lengths.to(device, non_blocking=non_blocking), self.num_contextual, users)

    def append(self, events: SequenceLayout) -> "Prefix":
        """The same rows with more history."""
        return Prefix(self.lengths + events.lengths.view_as(self.lengths), self.num_contextual, self.users)


def _behind(old: SequenceLayout, new: SequenceLayout) -> Selection:
    """Each sample of `new`, which is nothing but history, behind the same one of `old`; the index is of the
    rows of old and new, one after the other.

    Raises:
        ValueError: the lengths of one are on a device only.
    """
    both = SequenceLayout(old.on_host().lengths + new.on_host().lengths, new.on_host().lengths)
    # Read as history and targets, since these can be put together from blocks.
    return Selection(_grown(old, new), both.to(old.device).assemble_index())


def _grown(old: SequenceLayout, new: SequenceLayout) -> SequenceLayout:
    if old.parts:
        return SequenceLayout.join([_grown(*pair) for pair in zip(old.parts, new.parts, strict=True)])
    lengths = old.on_host().lengths + new.on_host().lengths
    return SequenceLayout(lengths, None, old.num_contextual).to(old.device)
