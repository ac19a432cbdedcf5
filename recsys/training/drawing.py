"""Draws the sequence of one sample at every stage of a model as text, for `--dry-run`.

A stage is a series of layers with the same mask over the same tokens. Each token is a line with its current
position, its position in the whole sequence, its kind, and a mark for each token that it may see (`#`) or not
(`.`). Lines and marks both leave out the middle of a long history.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from recsys.data.batch import Batch
from recsys.modules.mixers.base import Mixer
from recsys.modules.mixers.rules import LayerRule
from recsys.ops import AttentionMask, SequenceLayout
from recsys.ops.jagged.mask import key_intervals

_KINDS = ("contextual", "history", "target")
_AT_EACH_END = 8
"""Draw this many tokens from the beginning and from the end of each kind."""
_LEFT_OUT = -1


class _Sequence(NamedTuple):
    """The input of one stack of layers: a name for it, the stack, and the layout of one sample's tokens."""

    name: str
    stack: nn.Module
    layout: SequenceLayout


def draw_stages(mixer: Mixer, batch: Batch, row: int) -> str:
    """Draws the sequence of batch row `row` at every stage of each channel.

    Args:
        mixer: the model's mixer.
        batch: a batch on the host, or whose lengths have a host copy.
    """
    lines: list[str] = []
    for sequence in _sequences(mixer, batch, row):
        lines += _draw(sequence)
    return "\n".join(lines)


def _sequences(mixer: Mixer, batch: Batch, row: int) -> Iterator[_Sequence]:
    stacks, parts = mixer.channel_stacks(), batch.sequences.parts
    if not parts:
        yield _Sequence("sequence", stacks[0], _sample(batch.sequences, row))
        return
    for name, stack, layout in zip(batch.channel_events, stacks, parts, strict=True):
        yield _Sequence(f"channel {name}", stack, _sample(layout, row))


def _sample(layout: SequenceLayout, row: int) -> SequenceLayout:
    host = layout.on_host()
    return SequenceLayout(host.lengths[row : row + 1], host.num_targets[row : row + 1], host.num_contextual)


def _draw(sequence: _Sequence) -> list[str]:
    layout, origin = sequence.layout, torch.arange(sequence.layout.total_len)
    lines, first = [f"{sequence.name}: {_counts(layout)}"], 1
    rules = getattr(sequence.stack, "rules", None)
    if rules is None:
        return [*lines, f"  {type(sequence.stack).__name__} declares no rules for its layers"]
    for stage in _stages(rules):
        if stage.tail_len is not None:
            before = layout.total_len
            layout, index = layout.truncate(stage.tail_len)
            origin = origin[index]
            ended = before - layout.total_len
            lines.append(
                f"  attention truncation to {stage.tail_len} history tokens: {ended} tokens are dropped"
            )
        last = first + stage.num_layers - 1
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        lines += [f"  {layers}: {_words(stage.mask)}", *_tokens(layout, origin.tolist(), stage.mask)]
        first = last + 1
    if layout.total_targets:
        return [*lines, f"  to the head: {_number(layout.total_targets, 'target')}"]
    return [*lines, f"  to the comparison with items: {_number(int(layout.num_uih), 'query token')}"]


class _Stage(NamedTuple):
    """Consecutive layers with the same mask over the same tokens; a truncation begins a new stage."""

    tail_len: int | None
    mask: AttentionMask
    num_layers: int


def _stages(rules: Iterable[LayerRule]) -> list[_Stage]:
    stages: list[_Stage] = []
    for rule in rules:
        if stages and rule.tail_len is None and rule.mask == stages[-1].mask:
            stages[-1] = stages[-1]._replace(num_layers=stages[-1].num_layers + 1)
        else:
            stages.append(_Stage(rule.tail_len, rule.mask, 1))
    return stages


def _tokens(layout: SequenceLayout, origin: list[int], mask: AttentionMask) -> list[str]:
    """Draws a line for each token that is shown."""
    kinds = layout.kinds().tolist()
    by_kind = [[place for place, kind in enumerate(kinds) if kind == wanted] for wanted in range(len(_KINDS))]
    shown = [place for places in by_kind for place in _ends(places)]
    start, end = (bounds.tolist() for bounds in key_intervals(mask, layout))
    lines = []
    for place in shown:
        if place == _LEFT_OUT:
            lines.append("          ...")
            continue
        intervals = [range(*bounds) for bounds in zip(start[place], end[place], strict=True)]
        marks = "".join(_mark(key, intervals) for key in shown)
        lines.append(f"    {place:>4} {origin[place]:>4}  {_KINDS[kinds[place]]:<10}  {marks}")
    return lines


def _mark(key: int, intervals: list[range]) -> str:
    if key == _LEFT_OUT:
        return " "
    return "#" if any(key in interval for interval in intervals) else "."


def _ends(places: list[int]) -> list[int]:
    if len(places) <= 2 * _AT_EACH_END + 1:
        return places
    return [*places[:_AT_EACH_END], _LEFT_OUT, *places[-_AT_EACH_END:]]


def _counts(layout: SequenceLayout) -> str:
    numbers = (layout.num_contextual, int(layout.num_uih), layout.total_targets)
    parts = ", ".join(f"{number} {kind}" for number, kind in zip(numbers, _KINDS, strict=True))
    return f"{parts} tokens"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _words(mask: AttentionMask) -> str:
    words = [
        "full causal attention" if mask.window is None else f"window {mask.window}, prefix {mask.prefix}"
    ]
    if mask.target_window:
        words.append("for targets too")
    if mask.target_group_size > 1:
        words.append(f"targets in groups of {mask.target_group_size}")
    if not mask.contextual_reads_history:
        words.append("contextual tokens do not read history")
    return ", ".join(words)
