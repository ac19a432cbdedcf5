"""Stacks of STU layers with a cache: keys and values of history once, then targets or new events alone.

All functions take stacks that run in step (equal messages, weights of their own), often only one; sequences
and layouts are then joined over the stacks. Equal to `forward` on whole samples up to rounding. For models in
evaluation mode. Source: M-FALCON in Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from recsys.modules.cache import OWN, CacheStage, Memory
from recsys.modules.mixers.batched_layers import Halves, finish, in_policy, keys_and_values, parts_of, project
from recsys.modules.mixers.rules import LayerRule
from recsys.modules.precision import product_dtype
from recsys.modules.sequence import JaggedSequence
from recsys.modules.stu import STULayer
from recsys.ops import SequenceLayout


class Stack(Protocol):
    """The parts of an `HstuMixer` that run with a cache; see there."""

    training: bool
    layers: nn.ModuleList
    biases: nn.ModuleList
    rules: Sequence[LayerRule]
    reads_times: bool
    attention: Callable[..., Tensor]
    cached_attention: Callable[..., Tensor]


def prefill(
    stacks: Sequence[Stack], sequence: JaggedSequence, memory: Memory = OWN
) -> tuple[CacheStage, ...]:
    """Runs contextual and history tokens as far as targets will look at them: of the last layer only keys and
    values are computed.

    Args:
        sequence: without targets.
        memory: where keys, values and times come to lie.

    Raises:
        ValueError: there are targets. RuntimeError: the stacks are in training.
    """
    _require_evaluation(stacks)
    if sequence.layout.total_targets:
        raise ValueError(
            f"prefill takes contextual and history tokens, {sequence.layout.total_targets} targets are given"
        )
    first, stages, given = stacks[0], [], sequence.values
    sequence = in_policy(sequence)
    for number, rule in enumerate(first.rules):
        sequence = rule.truncate(sequence)
        layers, parts = [stack.layers[number] for stack in stacks], parts_of(sequence)
        if number == 0 or rule.tail_len is not None:
            times = memory.keep(sequence.timestamps) if first.biases else None
            stages.append(CacheStage(sequence.layout, times))
        is_last = number + 1 == len(first.rules)
        place = _place(layers[0], is_last, sequence.values, memory)
        made = (keys_and_values if is_last else project)(layers, parts, place)
        k, v = (made.k, made.v) if place is not None else map(memory.keep, (made.k, made.v))
        stages[-1] = stages[-1].with_layer(k, v)
        if isinstance(made, Halves):
            q, k, v = made.q, made.k, made.v
            bias = first.biases[number](sequence) if first.biases else None
            attended = first.attention(q, k, v, layout=sequence.layout, mask=rule.mask, bias=bias)
            is_own = sequence.values is not given
            sequence = sequence.with_values(finish(layers, parts, made, attended, in_place=is_own))
    return tuple(stages)


def score(stacks: Sequence[Stack], sequence: JaggedSequence, stages: Sequence[CacheStage]) -> JaggedSequence:
    """Mixed targets.

    Args:
        sequence: targets only, any number of each sample of the cache; whole target groups.
        stages: what `prefill` returned.

    Raises:
        TypeError, ValueError: other samples, dtype or device than those of the cache. RuntimeError: in
            training, or gradients are asked for.
    """
    _require_evaluation(stacks)
    given, sequence = sequence.values.dtype, in_policy(sequence)
    for number, (stage, place) in enumerate(_layers(stages)):
        layers, parts = [stack.layers[number] for stack in stacks], parts_of(sequence)
        halves = project(layers, parts)
        attended = _attend(stacks[0], number, sequence, halves, stage, place)
        sequence = sequence.with_values(finish(layers, parts, halves, attended, in_place=number > 0))
    return sequence.with_values(sequence.values.to(given))


def extend(
    stacks: Sequence[Stack], sequence: JaggedSequence, stages: Sequence[CacheStage]
) -> tuple[CacheStage, ...]:
    """The cache of histories that have grown; the given one stays as it is.

    Args:
        sequence: the new events' tokens only, oldest first; samples may have none.
        stages: what `prefill` or `extend` returned.

    Raises:
        ValueError: the result would not be that of `prefill`; see `require_extendable`. Or there are
            other tokens than history.
        RuntimeError: in training, or gradients are asked for.
    """
    _require_evaluation(stacks)
    sequence = in_policy(sequence)
    new = sequence.layout
    if new.num_contextual or new.total_targets:
        raise ValueError(
            f"extend takes new events only; there are {new.num_contextual} contextual tokens a sample and "
            f"{new.total_targets} targets"
        )
    require_extendable(stacks[0], stages, new)
    last, timestamps = len(stacks[0].rules) - 1, sequence.timestamps
    keys, values = [], []
    for number, (stage, place) in enumerate(_layers(stages)):
        layers, parts = [stack.layers[number] for stack in stacks], parts_of(sequence)
        made = project(layers, parts) if number < last else keys_and_values(layers, parts)
        keys.append(made.k)
        values.append(made.v)
        if isinstance(made, Halves):
            attended = _attend(stacks[0], number, sequence, made, stage, place)
            sequence = sequence.with_values(finish(layers, parts, made, attended))
    grown, first = [], 0
    for stage in stages:
        own = slice(first, first + len(stage.keys))
        times = timestamps if stage.timestamps is not None else None
        grown.append(stage.append(CacheStage(new, times, tuple(keys[own]), tuple(values[own]))))
        first = own.stop
    tail_len = stacks[0].rules[last].tail_len
    if tail_len is not None:
        grown[-1] = grown[-1].truncate(tail_len)
    return tuple(grown)


def require_extendable(mixer: Stack, stages: Sequence[CacheStage], new: SequenceLayout) -> None:
    """Passes where new events leave alone what is kept of the old tokens.

    A layer keeps what it makes of its input, the output of the layer in front; so all layers but the last
    must give old tokens the same output as before. They do not where contextual tokens read the history,
    where a truncation leaves out more than it did, or where a token knows when the next one comes. In front
    of the last layer a truncation may cut: what it drops is dropped from the cache.

    Raises:
        ValueError: naming the setting.
    """
    num_contextual, instead = stages[0].layout.num_contextual, "call prefill with the whole history"
    if mixer.reads_times and (len(mixer.rules) > 1 or num_contextual):
        raise ValueError(
            "a cache cannot be extended with bias.num_time_buckets > 0: tokens look at the time of what "
            f"comes after them, which has changed; {instead}"
        )
    for number, (stage, _) in list(enumerate(_layers(stages)))[:-1]:
        rule = mixer.rules[number]
        if not rule.mask.history_can_grow(num_contextual):
            raise ValueError(
                "a cache cannot be extended where contextual tokens read the history, as in layer "
                f"{number}: they change, and with them all events; {instead}, or set "
                "mask.contextual_reads_history to false before training"
            )
        grown = stage.layout.on_host().num_uih + new.on_host().num_uih
        if rule.tail_len is not None and bool((grown > rule.tail_len).any()):
            raise ValueError(
                "a cache cannot be extended where a truncation cuts more than before: "
                f"{int(grown.max())} tokens of a history would reach layer {number}, whose tail_len is "
                f"{rule.tail_len}; {instead}"
            )


def _layers(stages: Sequence[CacheStage]) -> Iterator[tuple[CacheStage, int]]:
    """For each layer of a stack its stage, and its place there."""
    for stage in stages:
        for place in range(len(stage.keys)):
            yield stage, place


def _place(layer: STULayer, is_last: bool, x: Tensor, memory: Memory) -> Tensor | None:
    """Memory of the cache for what a layer makes of tokens x, where it can be made there."""
    if not layer.fills_places(x):
        return None
    u, v, q, k = layer.widths
    return memory.place((x.shape[0], v + k if is_last else u + v + q + k), product_dtype(x), x.device)


def _attend(
    mixer: Stack, number: int, sequence: JaggedSequence, halves: Halves, stage: CacheStage, place: int
) -> Tensor:
    """Attention of new tokens on the cache and on each other, [T, H, V]."""
    bias = None
    if mixer.biases:
        bias = mixer.biases[number](sequence).with_cache(stage.timestamps)
    return mixer.cached_attention(
        halves.q,
        halves.k,
        halves.v,
        sequence.layout,
        stage.keys[place],
        stage.values[place],
        stage.layout,
        mixer.rules[number].mask,
        bias=bias,
    )


def _require_evaluation(stacks: Sequence[Stack]) -> None:
    if any(stack.training for stack in stacks):
        raise RuntimeError("a cache is for a model in evaluation mode: call eval() first")
