"""Caches of contextual and history tokens, with which targets can be scored alone.

Attention keeps the keys and values of all tokens, linear attention a state of constant size. Caches are
plain values: a mixer's `prefill` returns a cache, `score` reads it, and `extend` returns a new one. No
module stores any part of a cache, so a caller can keep it, move it to the host and back, select samples
from it, and drop it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from recsys.modules.recurrent_cache import StateStage
from recsys.modules.sequence import JaggedSequence
from recsys.ops import Selection, SequenceLayout, gather_rows, offsets_from_lengths

WORD = torch.complex128
"""Rows are copied as 16-byte words where strides allow, since a strided copy moves narrow elements singly."""


def copied(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy: a view would keep the layer's whole projection in memory."""
    if torch.compiler.is_compiling():
        return tensor.clone(memory_format=torch.contiguous_format)
    return copy_rows(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))


def copy_rows(source: Tensor, target: Tensor) -> Tensor:
    """Copies [T, ...] into `target` and returns it. Copies 16-byte words if both tensors' rows allow it."""
    pair = [tensor.flatten(1) if tensor.dim() > 2 else tensor for tensor in (source, target)]
    if all(rows.dim() == 2 and rows.stride(1) == 1 for rows in pair):
        numbers = max(WORD.itemsize // source.element_size(), 1)
        sizes = [size for rows in pair for size in (rows.shape[1], rows.stride(0), rows.storage_offset())]
        if not any(size % numbers for size in sizes):
            pair = [rows.view(WORD) for rows in pair]
    pair[1].copy_(pair[0])
    return target


@dataclass(frozen=True, eq=False)
class CacheStage:
    """Keys and values of consecutive layers that see the same tokens.

    A stage covers all layers of a stack, or those up to the next truncation.

    Attributes:
        layout: contextual and history tokens of each sample, T in all, no targets. If several stacks run as
            one batch, their samples follow each other stack by stack, and `layout.parts` are the stacks'
            layouts.
        timestamps: int64 [T], seconds; None if no bias reads times.
        keys: a tensor [T, H, D] per layer.
        values: a tensor [T, H, V] per layer.
    """

    layout: SequenceLayout
    timestamps: Tensor | None
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def with_layer(self, k: Tensor, v: Tensor) -> "CacheStage":
        """Returns the stage with the keys and values of one more layer."""
        return CacheStage(self.layout, self.timestamps, (*self.keys, k), (*self.values, v))

    def append(self, new: "CacheStage") -> "CacheStage":
        """Appends each sample's history tokens in `new`, a stage of the same layers, to the sample."""
        layout, index = _behind(self.layout, new.layout)
        joined = iter([gather_rows(pair, index) for pair in zip(self.tensors, new.tensors, strict=True)])
        return self.map(lambda _: next(joined), layout)

    @classmethod
    def join(cls, stages: Sequence["CacheStage"]) -> "CacheStage":
        """Joins the samples of stages of the same layers, in order; within each part of a joined layout."""
        first, layouts = stages[0], [stage.layout.parts or (stage.layout,) for stage in stages]
        parts = [_side_by_side(part) for part in zip(*layouts, strict=True)]
        layout = SequenceLayout.join(parts) if len(parts) > 1 else parts[0]
        sizes = [[part.total_len for part in of_stage] for of_stage in layouts]

        def joined(tensors: tuple[Tensor, ...]) -> Tensor:
            split = [tensor.split(lengths) for tensor, lengths in zip(tensors, sizes, strict=True)]
            return torch.cat([rows[part] for part in range(len(parts)) for rows in split])

        tensors = iter([joined(same) for same in zip(*(stage.tensors for stage in stages), strict=True)])
        return first.map(lambda _: next(tensors), layout)

    def truncate(self, tail_len: int) -> "CacheStage":
        """Keeps contextual tokens and the newest `tail_len` history tokens of each sample."""
        layout, index = self.layout.truncate(tail_len)
        return self.map(lambda tensor: gather_rows(tensor, index), layout)

    def map(self, change: Callable[[Tensor], Tensor], layout: SequenceLayout) -> "CacheStage":
        """Applies `change` to all `tensors`, in their order, and combines the results with another layout."""
        return CacheStage(
            layout,
            None if self.timestamps is None else change(self.timestamps),
            tuple(map(change, self.keys)),
            tuple(map(change, self.values)),
        )

    def select(self, samples: Sequence[int]) -> "CacheStage":
        """Returns the stage with the given samples only; see `SequenceLayout.select`."""
        layout, index = self.layout.select(samples)
        return self.map(lambda tensor: tensor.index_select(0, index), layout)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "CacheStage":
        """Returns a copy on a device."""
        moved = self.layout.to(device, non_blocking)
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking), moved)

    @property
    def num_bytes(self) -> int:
        """The size of timestamps, keys and values in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The timestamps if there are any, then the keys of each layer, then the values of each layer."""
        times = () if self.timestamps is None else (self.timestamps,)
        return (*times, *self.keys, *self.values)


Stage: TypeAlias = CacheStage | StateStage
"""The cache of consecutive layers."""


@dataclass(frozen=True)
class StageSpec:
    """Describes the tensors of a `CacheStage` or a `StateStage` for packages.

    Attributes:
        name: identifier of the stage.
        stack: index of the stage's stack.
        channels: indices of the channels whose tokens the stage holds.
        num_layers: number of layers.
        has_times: whether the layers read times.
        tail_len: number of history tokens that a truncation keeps; None if all are kept.
        num_heads, qk_dim, v_dim: shape of a token's keys and values.
        states: shapes [heads, D, V] of the states of all layers; the stage has no keys and values then.
        slides: whether the truncation may drop more tokens when a cache is extended; true only for a stage of
            one layer whose output nothing but targets read.
    """

    name: str
    stack: int
    channels: list[int]
    num_layers: int
    has_times: bool
    tail_len: int | None = None
    num_heads: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    states: list[list[int]] = field(default_factory=list)
    slides: bool = False


@dataclass(frozen=True, eq=False)
class MixerCache:
    """The cache of a mixer for B samples.

    Attributes:
        stacks: for each stack of layers, or group of stacks that run as one batch, its stages.
    """

    stacks: tuple[tuple[Stage, ...], ...]

    @classmethod
    def join(cls, caches: Sequence["MixerCache"]) -> "MixerCache":
        """Joins the samples of caches of the same mixer, in order."""
        stacks = zip(*(cache.stacks for cache in caches), strict=True)
        joined = [[type(same[0]).join(same) for same in zip(*stages, strict=True)] for stages in stacks]
        return cls(tuple(map(tuple, joined)))

    def select(self, samples: Sequence[int]) -> "MixerCache":
        """Returns a copy with these samples in this order; a sample may occur more than once."""
        return self._map(lambda stage: stage.select(samples))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "MixerCache":
        """Returns a copy on a device."""
        return self._map(lambda stage: stage.to(device, non_blocking))

    @property
    def num_bytes(self) -> int:
        """The size of all tensors but lengths in bytes."""
        return sum(stage.num_bytes for stack in self.stacks for stage in stack)

    def _map(self, change: Callable[[Stage], Stage]) -> "MixerCache":
        return MixerCache(tuple(tuple(map(change, stack)) for stack in self.stacks))


class Encoded(NamedTuple):
    """The result of `CachingMixer.encode`.

    Attributes:
        cache: the cache.
        sequence: the mixed tokens; None unless they were asked for.
    """

    cache: MixerCache
    sequence: JaggedSequence | None


class CachingMixer:
    """A mixer that can score with a cache; a base class beside `Mixer`."""

    @property
    def keeps_cache(self) -> bool:
        """Whether the mixer can in fact score with a cache."""
        return True

    @property
    def target_group_size(self) -> int:
        """The number of consecutive targets that can only be scored together."""
        return 1

    def encode(
        self, sequence: JaggedSequence, cache: MixerCache | None = None, *, mixes: bool = False
    ) -> Encoded:
        """Adds contextual and history tokens to a cache, which does not change; see `prefill` and `extend`.

        Args:
            sequence: the tokens.
            cache: the cache of the tokens before them; None if there are none.
            mixes: whether to return the mixed tokens too, for a mixer that follows.
        """
        raise NotImplementedError

    def score(self, sequence: JaggedSequence, cache: MixerCache) -> JaggedSequence:
        """Mixes targets as `forward` mixes them after the tokens of the cache."""
        raise NotImplementedError

    def cache_stages(self) -> list[StageSpec]:
        """Describes the stages of the mixer's caches, stack by stack."""
        raise NotImplementedError

    def require_extendable(self, num_contextual: int, *, mixes: bool = False) -> None:
        """Checks that `extend` can equal `prefill`, unless a truncation drops more tokens than before.

        Exported packages extend caches only with mixers that override this.

        Args:
            num_contextual: number of contextual tokens of each sample.
            mixes: whether a mixer that follows reads the mixed tokens.

        Raises:
            NotExtendableError: names the setting that prevents it.
        """
        raise NotExtendableError(f"{type(self).__name__} does not say whether its caches can be extended")

    def prefill(self, sequence: JaggedSequence) -> MixerCache:
        """Returns the cache of contextual and history tokens.

        Raises:
            ValueError: there are targets.
            RuntimeError: the mixer is in training mode.
        """
        return self.encode(sequence).cache

    def extend(self, sequence: JaggedSequence, cache: MixerCache) -> MixerCache:
        """Returns the cache of the histories with these tokens appended.

        Raises:
            NotExtendableError: the cache would differ from that of `prefill`.
            ValueError: there are tokens other than history.
            RuntimeError: the mixer is in training mode.
        """
        return self.encode(sequence, cache).cache


class NotExtendableError(ValueError):
    """Later events would change the cached keys and values of earlier tokens; names the setting."""


def caches(mixer: nn.Module) -> bool:
    """Returns whether the mixer can score with a cache."""
    return isinstance(mixer, CachingMixer) and mixer.keeps_cache


def require_caching(mixer: nn.Module) -> CachingMixer:
    """Returns the mixer as a `CachingMixer`.

    Raises:
        ValueError: the mixer cannot score with a cache.
    """
    if not caches(mixer):
        problem = f"{type(mixer).__name__} cannot score with a cache"
        raise ValueError(f"{problem}; score whole rows, or train with a mixer that can, such as HstuMixer")
    return mixer


def require_evaluation(*modules: nn.Module) -> None:
    """Raises RuntimeError if any module is in training mode."""
    if any(module.training for module in modules):
        raise RuntimeError("a cache is for a model in evaluation mode: call eval() first")


def require_prefix(layout: SequenceLayout) -> None:
    """Raises ValueError if there are targets, which `prefill` does not take."""
    if layout.total_targets:
        raise ValueError(
            f"prefill takes only contextual and history tokens, but {layout.total_targets} targets are given"
        )


def require_uncut(num_history: Tensor, tail_len: int, place: str) -> None:
    """Checks that a truncation drops no more tokens of extended histories than before.

    Args:
        num_history: int64 [B] on the host, the number of cached and new history tokens.
        tail_len: number of history tokens that the truncation keeps.
        place: name of the layer or stage behind the truncation.

    Raises:
        NotExtendableError: names the truncation.
    """
    if bool((num_history > tail_len).any()):
        raise NotExtendableError(
            "a cache cannot be extended where a truncation cuts more than before: "
            f"{int(num_history.max())} tokens of a history would reach {place}, whose tail_len is "
            f"{tail_len}; call prefill with the whole history"
        )


def require_events(layout: SequenceLayout) -> None:
    """Raises ValueError if there are tokens other than history, which `extend` does not take."""
    if layout.num_contextual or layout.total_targets:
        raise ValueError(
            f"extend takes only new events, but {layout.num_contextual} contextual tokens per sample and "
            f"{layout.total_targets} targets are given"
        )


def _behind(old: SequenceLayout, new: SequenceLayout) -> Selection:
    """Appends each sample of `new`, which has history tokens only, to the same sample of `old`.

    The index of the selection counts the tokens of `old`, then those of `new`.

    Raises:
        ValueError: the lengths of a layout are only on a device, and nothing is traced.
    """
    # Treat the new tokens as targets, because a layout can assemble history and targets from blocks.
    return Selection(_grown(old, new), _summed(old, new, 0, are_targets=True).assemble_index())


def _side_by_side(layouts: Sequence[SequenceLayout]) -> SequenceLayout:
    """Returns the layout of the samples of several layouts without targets, in order."""
    lengths = torch.cat([layout.on_host().lengths for layout in layouts])
    return SequenceLayout(lengths, None, layouts[0].num_contextual).to(layouts[0].device)


def _grown(old: SequenceLayout, new: SequenceLayout) -> SequenceLayout:
    if old.parts:
        return SequenceLayout.join([_grown(*pair) for pair in zip(old.parts, new.parts, strict=True)])
    return _summed(old, new, old.num_contextual, are_targets=False)


def _summed(
    old: SequenceLayout, new: SequenceLayout, num_contextual: int, *, are_targets: bool
) -> SequenceLayout:
    """Returns the layout of samples as long as those of both layouts together.

    Args:
        are_targets: whether the tokens of `new` count as targets.
    """
    if torch.compiler.is_compiling():
        lengths = old.lengths + new.lengths
        return SequenceLayout.trusted(
            lengths,
            offsets_from_lengths(lengths),
            new.lengths if are_targets else torch.zeros_like(lengths),
            num_contextual,
            total_len=old.total_len + new.total_len,
            max_len=old.max_len + new.max_len,
            total_targets=new.total_len if are_targets else 0,
        )
    before, added = old.on_host().lengths, new.on_host().lengths
    layout = SequenceLayout(before + added, added if are_targets else None, num_contextual)
    return layout.to(old.device)
