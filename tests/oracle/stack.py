"""A stack of STU layers over the tokens of one sample: loops over queries and keys.

Written from sections 2 to 5 of the specification. What it leaves open, and what is meant here:

- Behind a truncation a token's index `r` in the relative bias is that in the shorter sample, as the
  specification says of `prefix`. Times, next times, positions and ages are those of before.
- Target groups are counted from the first target of the sample on; the last one may be smaller.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recsys import protos as pb
from tests.oracle.layers import Weights, concatenate, given, group_norm, layer_norm, linear, silu
from tests.oracle.tokens import Token


class Mask(NamedTuple):
    """A mask of the config in tokens."""

    window: int | None
    prefix: int
    target_window: bool
    target_group_size: int
    contextual_reads_history: bool


class Sizes(NamedTuple):
    """Sizes of a stack that other parts of the model decide."""

    max_seq_len: int
    tokens_per_event: int


def run(config: pb.HstuMixer, weights: Weights, tokens: list[Token], sizes: Sizes) -> list[Token]:
    """Runs all layers and returns the tokens left after the last one."""
    factor = {pb.TOKENS: 1, pb.EVENTS: sizes.tokens_per_event}
    groups = list(config.layer_groups)
    if not groups:
        groups = [pb.LayerGroup(num_layers=given(config, "num_layers", 2), mask=config.mask)]
    number = 0
    for group in groups:
        if group.HasField("tail_len"):
            tokens = truncated(tokens, group.tail_len * factor[group.tail_unit])
        given_mask = group.mask
        scale = factor[given_mask.unit]
        mask = Mask(
            given_mask.window * scale if given_mask.HasField("window") else None,
            given_mask.prefix * scale,
            given_mask.target_window,
            given_mask.target_group_size,
            given_mask.contextual_reads_history,
        )
        for _ in range(group.num_layers):
            tokens = layer(config, weights, number, tokens, mask, sizes)
            number += 1
    return tokens


def truncated(tokens: list[Token], tail_len: int) -> list[Token]:
    """Drops all history but its newest `tail_len` tokens."""
    surplus = max(0, count(tokens, "history") - tail_len)
    kept = [token for token in tokens if token.kind != "history" or token.place >= surplus]
    return [t._replace(place=t.place - surplus) if t.kind == "history" else t for t in kept]


def count(tokens: list[Token], kind: str) -> int:
    return sum(token.kind == kind for token in tokens)


def sees(query: Token, key: Token, num_history: int, mask: Mask) -> bool:
    """The mask's table."""
    if query is key or key.kind == "contextual":
        return True
    if query.kind == "contextual":
        return key.kind == "history" and mask.contextual_reads_history
    if query.kind == "history":
        if key.kind == "target" or key.place > query.place:
            return False
        near = mask.window is None or query.place - key.place < mask.window
        return near or key.place < mask.prefix
    if key.kind == "history":
        if mask.window is None or not mask.target_window:
            return True
        return key.place >= num_history - mask.window or key.place < mask.prefix
    group = mask.target_group_size
    return key.place // group == query.place // group and key.place < query.place


class Projected(NamedTuple):
    """The four parts of a token's projection: u [H * V], v [H, V], q and k [H, D]."""

    u: Tensor
    v: Tensor
    q: Tensor
    k: Tensor


def project(config: pb.HstuMixer, weights: Weights, x: Tensor) -> Projected:
    heads, key = config.num_heads, config.qk_dim
    value = given(config, "v_dim", key)
    widths = [heads * value, heads * value, heads * key, heads * key]
    u, v, q, k = linear(weights.at("uvqk"), layer_norm(weights.at("input_norm"), x)).split(widths)
    u = silu(u)
    if config.activation == pb.HstuMixer.UVQK:
        v, q, k = silu(v), silu(q), silu(k)
    return Projected(u, v.reshape(heads, value), q.reshape(heads, key), k.reshape(heads, key))


def layer(
    config: pb.HstuMixer, weights: Weights, number: int, tokens: list[Token], mask: Mask, sizes: Sizes
) -> list[Token]:
    """The tokens with what a layer makes of them."""
    layer_weights, bias = weights.at("layers", number), weights.at("biases", number)
    parts = [project(config, layer_weights, token.value) for token in tokens]
    num_contextual, num_history = count(tokens, "contextual"), count(tokens, "history")
    scale_len = given(config, "scale_len", sizes.max_seq_len)
    start = {"contextual": 0, "history": num_contextual, "target": num_contextual + num_history}

    def index(token: Token) -> int:
        grouped = token.place % mask.target_group_size if token.kind == "target" else token.place
        return start[token.kind] + grouped

    def bias_at(query: Token, key: Token) -> Tensor:
        positions = bias["position"]
        distance = min(max(index(query) - index(key), 0), positions.shape[-1] - 1)
        actual = positions[..., distance]
        if config.bias.num_time_buckets:
            seconds = max(1, abs(query.next_time - key.time))
            bucket = min(math.floor(math.log(seconds) / 0.301), config.bias.num_time_buckets - 1)
            actual = actual + bias["time"][..., bucket]
        return actual

    mixed = []
    for query, part in zip(tokens, parts, strict=True):
        attended = torch.zeros_like(part.v)
        seen = [pair for pair in zip(tokens, parts, strict=True) if sees(query, pair[0], num_history, mask)]
        if seen:
            keys, values = (torch.stack([getattr(of_key, name) for _, of_key in seen]) for name in "kv")
            scores = (part.q * keys).sum(2) / math.sqrt(config.qk_dim)
            if config.HasField("bias"):
                scores = scores + torch.stack([bias_at(query, key) for key, _ in seen]).view(len(seen), -1)
            attended = (silu(scores)[:, :, None] / scale_len * values).sum(0)
        mixed.append(
            query._replace(value=query.value + output(config, layer_weights, part.u, attended.flatten()))
        )
    return mixed


def output(config: pb.HstuMixer, weights: Weights, u: Tensor, attended: Tensor) -> Tensor:
    """Norm, gate and the last projection."""
    norm = weights.at("norm")
    if config.norm == pb.HstuMixer.GROUP_NORM:
        normed = group_norm(norm, attended, config.num_heads)
    else:
        normed = layer_norm(norm, attended)
    gated = u * normed
    y = gated if config.gate == pb.HstuMixer.UGN else concatenate([u, attended, gated])
    return linear(weights.at("output"), y)
