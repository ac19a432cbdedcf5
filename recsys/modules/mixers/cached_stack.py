"""Runs stacks of layers with a cache: keys and values of history once, then targets or events alone.

All functions take a list of stacks that run as one batch (equal messages, separate weights), often a single
stack; sequences and layouts are joined over the stacks. Up to rounding, results equal `forward` on whole
samples. The model must be in evaluation mode. Source: M-FALCON in Zhai et al., Actions Speak Louder than
Words, arXiv 2402.17152.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from recsys.modules.cache import (
    CacheStage,
    NotExtendableError,
    StageSpec,
    copied,
    require_evaluation,
    require_events,
    require_prefix,
    require_uncut,
)
from recsys.modules.mixers.batched_layers import (
    Layer,
    Projections,
    finish,
    keys_and_values,
    parts_of,
    project,
    to_compute_dtype,
)
from recsys.modules.mixers.rotary import RotaryPositions, Rotations
from recsys.modules.mixers.rules import LayerRule
from recsys.modules.sequence import JaggedSequence
from recsys.ops import SequenceLayout


class Stack(Protocol):
    """The interface of a stack that these functions use.

    Attributes:
        casts_residual: whether residual sums have the dtype of matrix products.
        rotary: turns queries and keys before attention, so that caches hold turned keys; None for a stack
            without it.
    """

    training: bool
    layers: Sequence[Layer]
    biases: Sequence[nn.Module]
    rotary: RotaryPositions | None
    rules: Sequence[LayerRule]
    reads_times: bool
    casts_residual: bool
    num_heads: int
    qk_dim: int
    v_dim: int
    attention: Callable[..., Tensor]
    cached_attention: Callable[..., Tensor]


class EncodedStack(NamedTuple):
    """The result of `prefill` and `extend`.

    Attributes:
        stages: the stages of the cache.
        sequence: the mixed tokens; None unless they were asked for.
    """

    stages: tuple[CacheStage, ...]
    sequence: JaggedSequence | None


def encode(
    stacks: Sequence[Stack], sequence: JaggedSequence, stages: Sequence[CacheStage] | None, mixes: bool
) -> EncodedStack:
    """Calls `prefill`, or `extend` if there are stages."""
    if stages is None:
        return prefill(stacks, sequence, mixes=mixes)
    return extend(stacks, sequence, stages, mixes=mixes)


def prefill(stacks: Sequence[Stack], sequence: JaggedSequence, *, mixes: bool = False) -> EncodedStack:
    """Computes the keys and values of contextual and history tokens that targets will read.

    Args:
        sequence: contextual and history tokens, no targets.
        mixes: whether to compute the last layer's output too.

    Raises:
        ValueError: there are targets.
        RuntimeError: the stacks are in training mode.
    """
    require_evaluation(*stacks)
    require_prefix(sequence.layout)
    first, stages, rotations = stacks[0], [], Rotations(stacks[0].rotary)
    input_dtype, sequence = sequence.values.dtype, _cast(first, sequence)
    for number, rule in enumerate(first.rules):
        sequence = rule.truncate(sequence)
        layers, parts = [stack.layers[number] for stack in stacks], parts_of(sequence)
        if number == 0 or rule.tail_len is not None:
            times = copied(sequence.timestamps) if first.biases else None
            stages.append(CacheStage(sequence.layout, times))
        is_read = mixes or number + 1 < len(first.rules)
        projected = (project if is_read else keys_and_values)(layers, parts)
        projections = rotations.apply(projected, sequence, rule.mask)
        stages[-1] = stages[-1].with_layer(copied(projections.k), copied(projections.v))
        if isinstance(projections, Projections):
            q, k, v = projections.q, projections.k, projections.v
            bias = {"bias": first.biases[number](sequence)} if first.biases else {}
            attended = first.attention(q, k, v, layout=sequence.layout, mask=rule.mask, **bias)
            sequence = sequence.with_values(finish(layers, parts, projections, attended))
    mixed = sequence.with_values(sequence.values.to(input_dtype)) if mixes else None
    return EncodedStack(tuple(stages), mixed)


def score(stacks: Sequence[Stack], sequence: JaggedSequence, stages: Sequence[CacheStage]) -> JaggedSequence:
    """Mixes targets, which attend to the tokens of the cache.

    Args:
        sequence: targets only, in whole target groups, any number for each sample of the cache.
        stages: the result of `prefill`.

    Raises:
        TypeError, ValueError: samples, dtype or device differ from those of the cache.
        RuntimeError: the stacks are in training mode, or gradients are enabled.
    """
    require_evaluation(*stacks)
    input_dtype, sequence = sequence.values.dtype, _cast(stacks[0], sequence)
    rotations = Rotations(stacks[0].rotary)
    for number, (stage, place) in enumerate(_layers(stages)):
        layers, parts = [stack.layers[number] for stack in stacks], parts_of(sequence)
        mask = stacks[0].rules[number].mask
        projections = rotations.apply(project(layers, parts), sequence, mask, stage.layout)
        attended = _attend(stacks[0], number, sequence, projections, stage, place)
        sequence = sequence.with_values(finish(layers, parts, projections, attended))
    return sequence.with_values(sequence.values.to(input_dtype))


def extend(
    stacks: Sequence[Stack],
    sequence: JaggedSequence,
    stages: Sequence[CacheStage],
    *,
    mixes: bool = False,
) -> EncodedStack:
    """Returns the cache of histories that have grown; `stages` do not change.

    Args:
        sequence: the new events' tokens only, oldest first; samples may have none.
        stages: the result of `prefill` or `extend`.
        mixes: whether to compute the last layer's output too, which must then leave old tokens unchanged.

    Raises:
        NotExtendableError: the result would differ from that of `prefill`; see `require_extendable`. In a
            traced graph, whose caller must check it, truncations that drop more than before go unnoticed.
        ValueError: there are tokens other than history.
        RuntimeError: the stacks are in training mode, or gradients are enabled.
    """
    require_evaluation(*stacks)
    new, timestamps = sequence.layout, sequence.timestamps
    require_events(new)
    input_dtype, sequence = sequence.values.dtype, _cast(stacks[0], sequence)
    require_extendable(stacks[0], stages[0].layout.num_contextual, mixes=mixes)
    if not torch.compiler.is_compiling():
        _require_uncut(stacks[0], stages, new, mixes=mixes)
    last = len(stacks[0].rules) - 1
    keys, values, rotations = [], [], Rotations(stacks[0].rotary)
    for number, (stage, place) in enumerate(_layers(stages)):
        layers, parts = [stack.layers[number] for stack in stacks], parts_of(sequence)
        projected = (project if mixes or number < last else keys_and_values)(layers, parts)
        mask = stacks[0].rules[number].mask
        projections = rotations.apply(projected, sequence, mask, stage.layout)
        keys.append(projections.k)
        values.append(projections.v)
        if isinstance(projections, Projections):
            attended = _attend(stacks[0], number, sequence, projections, stage, place)
            sequence = sequence.with_values(finish(layers, parts, projections, attended))
    grown, start = [], 0
    for stage in stages:
        stop = start + len(stage.keys)
        times = timestamps if stage.timestamps is not None else None
        grown.append(stage.append(CacheStage(new, times, tuple(keys[start:stop]), tuple(values[start:stop]))))
        start = stop
    tail_len = stacks[0].rules[last].tail_len
    if tail_len is not None:
        grown[-1] = grown[-1].truncate(tail_len)
    mixed = sequence.with_values(sequence.values.to(input_dtype)) if mixes else None
    return EncodedStack(tuple(grown), mixed)


def require_extendable(mixer: Stack, num_contextual: int, *, mixes: bool = False) -> None:
    """Checks that new events leave the cached keys and values of old tokens unchanged.

    A layer's keys and values depend on its input, the output of the layer before it. So every layer, but the
    last of all mixers, must give old tokens the same output as before. This fails if contextual tokens read
    the history, or if a token depends on the time of the next token; also if a truncation drops more tokens
    than before, which depends on the cache and is left to `require_uncut`. A truncation before the last layer
    may drop more tokens, since the cache drops them as well, unless keys are turned by their places.

    Args:
        mixer: the stack, or any of those that run as one batch.
        num_contextual: number of contextual tokens of each sample.
        mixes: whether another mixer reads the output of the last layer.

    Raises:
        NotExtendableError: names the setting that prevents it.
    """
    instead = "call prefill with the whole history"
    if mixer.reads_times and (mixes or len(mixer.rules) > 1 or num_contextual):
        setting = "bias.num_time_buckets" if mixer.rotary is None else "rotary.longest_seconds"
        raise NotExtendableError(
            f"a cache cannot be extended with {setting} > 0: a token reads the time of the token after it, "
            f"which has changed; {instead}"
        )
    for number, rule in enumerate(mixer.rules if mixes else mixer.rules[:-1]):
        if not rule.mask.history_can_grow(num_contextual):
            raise NotExtendableError(
                "a cache cannot be extended where contextual tokens read the history, as in layer "
                f"{number}: they change, and so does the state of every event; {instead}, or set "
                "mask.contextual_reads_history to false before training"
            )


def stage_specs(number: int, channels: Sequence[int], stack: Stack) -> list[StageSpec]:
    """Describes the cache stages of one stack, or of stacks that run as one batch.

    Args:
        number: index of the stack, or of the batch of stacks, in the mixer.
        channels: indices of the history's channels that run through it.
        stack: the stack, or any of those that run as one batch.
    """
    starts = [layer for layer, rule in enumerate(stack.rules) if layer == 0 or rule.tail_len is not None]
    return [
        StageSpec(
            name=f"stack_{number}_stage_{stage}",
            stack=number,
            channels=list(channels),
            num_layers=end - start,
            has_times=len(stack.biases) > 0,
            tail_len=stack.rules[start].tail_len,
            num_heads=stack.num_heads,
            qk_dim=stack.qk_dim,
            v_dim=stack.v_dim,
            slides=stack.rules[start].tail_len is not None
            and start + 1 == len(stack.rules)
            and stack.rotary is None,
        )
        for stage, (start, end) in enumerate(itertools.pairwise([*starts, len(stack.rules)]))
    ]


def _require_uncut(mixer: Stack, stages: Sequence[CacheStage], new: SequenceLayout, *, mixes: bool) -> None:
    """Raises NotExtendableError if a truncation drops more tokens than before; see `require_extendable`."""
    layers = list(enumerate(_layers(stages)))
    for number, (stage, _) in layers if mixes or mixer.rotary is not None else layers[:-1]:
        tail_len = mixer.rules[number].tail_len
        if tail_len is not None:
            grown = stage.layout.on_host().num_uih + new.on_host().num_uih
            require_uncut(grown, tail_len, f"layer {number}")


def _layers(stages: Sequence[CacheStage]) -> Iterator[tuple[CacheStage, int]]:
    """Yields, for each layer of a stack, its stage and its position in that stage."""
    for stage in stages:
        for place in range(len(stage.keys)):
            yield stage, place


def _attend(
    mixer: Stack,
    number: int,
    sequence: JaggedSequence,
    projections: Projections,
    stage: CacheStage,
    place: int,
) -> Tensor:
    """Lets new tokens attend to the cache and to each other; returns [T, H, V]."""
    bias = {}
    if mixer.biases:
        bias["bias"] = mixer.biases[number](sequence).with_cache(stage.timestamps)
    return mixer.cached_attention(
        projections.q,
        projections.k,
        projections.v,
        sequence.layout,
        stage.keys[place],
        stage.values[place],
        stage.layout,
        mixer.rules[number].mask,
        **bias,
    )


def _cast(stack: Stack, sequence: JaggedSequence) -> JaggedSequence:
    return to_compute_dtype(sequence) if stack.casts_residual else sequence
