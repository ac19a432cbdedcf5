"""Derives mask and truncation of each layer of a mixer from its config, with or without layer groups."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from recsys import protos as pb
from recsys.modules.flops import attention_flops, linear_flops
from recsys.modules.mixers.mask import mask_of
from recsys.modules.sequence import JaggedSequence
from recsys.ops import AttentionMask, SequenceLayout


class LayerRule(NamedTuple):
    """Mask and truncation of one layer of a stack.

    Attributes:
        mask: which tokens see each other in the layer.
        tail_len: number of history tokens that the truncation before the layer keeps; None without
            truncation.
    """

    mask: AttentionMask
    tail_len: int | None = None

    def truncate(self, sequence: JaggedSequence) -> JaggedSequence:
        """Returns the layer's input, given the output of the previous layer."""
        return sequence if self.tail_len is None else sequence.truncate(self.tail_len)

    def truncate_layout(self, layout: SequenceLayout) -> SequenceLayout:
        """Returns the layout of the layer's input, given that of the previous layer's output."""
        return layout if self.tail_len is None else layout.truncate(self.tail_len).layout


def layer_rules(config: pb.HstuMixer | pb.SasRecMixer) -> list[LayerRule]:
    """Returns the rule of each layer of a resolved config, first layer first.

    Raises:
        ValueError: both `layer_groups` and `num_layers` or `mask` are given, a length is in events
            (`config.resolve` converts them to tokens), or a truncation keeps more than an earlier one.
    """
    name = config.DESCRIPTOR.name
    if config.layer_groups and (config.HasField("num_layers") or config.HasField("mask")):
        raise ValueError(f"{name}: give layer_groups, or num_layers and mask, not both")
    rules: list[LayerRule] = []
    shortest: int | None = None
    for number, group in enumerate(config.layer_groups or [_only_group(config)]):
        tail_len = group.tail_len if group.HasField("tail_len") else None
        if tail_len is not None:
            if group.tail_unit == pb.EVENTS:
                raise ValueError(
                    f"{name}: tail_len of layer_groups[{number}] is in events: resolve the config"
                )
            if shortest is not None and tail_len > shortest:
                raise ValueError(
                    f"{name}: tail_len {tail_len} of layer_groups[{number}] is more than the {shortest} "
                    "tokens that an earlier group leaves"
                )
            shortest = tail_len
        mask = mask_of(group.mask)
        rules += [LayerRule(mask, None if layer else tail_len) for layer in range(group.num_layers)]
    return rules


def stack_flops(
    layers: Iterable[nn.Module],
    rules: Sequence[LayerRule],
    layout: SequenceLayout,
    embedding_dim: int,
    attention_width: int,
) -> int:
    """Counts the FLOP of all layers, each on its remaining tokens; see `recsys.modules.flops`.

    In the layer before a truncation, the tokens that it drops need only keys and values.

    Args:
        embedding_dim: E.
        attention_width: heads x (width of a key + width of a value).
    """
    total = 0
    layout = rules[0].truncate_layout(layout)
    for number, (layer, rule) in enumerate(zip(layers, rules, strict=True)):
        tail_len = rules[number + 1].tail_len if number + 1 < len(rules) else None
        kept = layout if tail_len is None else layout.truncate(tail_len).layout
        attention = attention_flops(rule.mask, layout, attention_width, tail_len)
        looked_at = 2 * (layout.total_len - kept.total_len) * embedding_dim * attention_width
        total += linear_flops(layer, kept.total_len) + looked_at + attention
        layout = kept
    return total


def _only_group(config: pb.HstuMixer | pb.SasRecMixer) -> pb.LayerGroup:
    group = pb.LayerGroup(mask=config.mask)
    if config.HasField("num_layers"):
        group.num_layers = config.num_layers
    return group
