"""A stack of linear-attention layers over the tokens of one sample: loops over queries and keys, no state.

Written from the formulas of arXiv 2307.08621 (retention), 2312.06635 (gated) and 2412.06464 (delta rule),
with the sum over keys written out: a key's weight is its product with the query, channel by channel, times
all decays in between. The delta rule replaces values by what they add, one key after the other. The further
channels weigh values by sums of damped waves of the distance in time or in tokens.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor

from recsys import protos as pb
from tests.oracle.layers import Weights, given, group_norm, layer_norm, linear, silu
from tests.oracle.tokens import Token

MINUTE, HOUR, DAY = 60, 3600, 86400
PERIODS = {
    "time": (MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY, 7 * DAY, 30 * DAY, 365 * DAY),
    "position": (2, 4, 8, 16, 64, 128, 256, 1024),
}


def run(config: pb.LinearMixer, weights: Weights, tokens: list[Token]) -> list[Token]:
    """Runs all layers; every token remains."""
    for number in range(config.num_layers):
        tokens = layer(config, weights.at("layers", number), tokens)
    return tokens


def predecessors(tokens: list[Token], index: int) -> list[int]:
    """The tokens that the recurrence has gone through when it comes to a token, oldest first, itself last."""
    before = [i for i, token in enumerate(tokens[:index]) if token.kind != "target"]
    return [*before, index]


def layer(config: pb.LinearMixer, weights: Weights, tokens: list[Token]) -> list[Token]:
    heads, key = config.num_heads, config.qk_dim
    value = given(config, "v_dim", key)
    names = [n for n, used in (("time", config.time_channel), ("position", config.position_channel)) if used]
    gates = {pb.LinearMixer.RETENTION: 0, pb.LinearMixer.GATED: heads * key, pb.LinearMixer.DELTA: 2 * heads}
    widths = [heads * value * (1 + len(names)), heads * value, heads * key, heads * key, gates[config.form]]
    parts = [
        linear(weights.at("uvqk"), layer_norm(weights.at("input_norm"), t.value)).split(widths)
        for t in tokens
    ]
    mixed = []
    for index, token in enumerate(tokens):
        path = predecessors(tokens, index)
        attended = [by_content(config, weights, [parts[i] for i in path], head) for head in range(heads)]
        for name in names:
            waves = weights.at("channels", name)
            steps = distances(name, [tokens[i] for i in path], sum(t.kind == "history" for t in tokens))
            for head in range(heads):
                total = torch.zeros(value, dtype=torch.float64)
                for i, (elapsed, apart) in zip(path, steps, strict=True):
                    if apart is not None:
                        v = silu(parts[i][1]).reshape(heads, value)[head]
                        total = total + weight(PERIODS[name], waves, head, elapsed, apart) / math.sqrt(16) * v
                attended.append(total)
        gated = silu(parts[index][0]) * group_norm(weights.at("norm"), torch.cat(attended), len(attended))
        x = token.value + linear(weights.at("output"), gated)
        if given(config, "feed_forward_dim", len(x)):
            second = weights.at("feed_forward")
            gate, values = linear(second.at("widen"), layer_norm(second.at("norm"), x)).chunk(2)
            x = x + linear(second.at("narrow"), silu(gate) * values)
        mixed.append(token._replace(value=x))
    return mixed


def by_content(config: pb.LinearMixer, weights: Weights, path: list, head: int) -> Tensor:
    """The answer of one head to the query of the last token of a path."""
    heads, key = config.num_heads, config.qk_dim
    rate = 2 ** (-(head + 0.5) * 10 / heads) * torch.exp(weights["log_rate"][head])
    queries, keys, values, decays, betas = [], [], [], [], []
    for _, v, q, k, gate in path:
        values.append(silu(v).reshape(heads, -1)[head])
        queries.append(silu(q).reshape(heads, key)[head])
        keys.append(silu(k).reshape(heads, key)[head])
        logit = torch.zeros(key, dtype=torch.float64)  # forgetting at the head's rate
        if config.form == pb.LinearMixer.GATED:
            logit = gate.reshape(heads, key)[head]
        if config.form == pb.LinearMixer.DELTA:
            logit = gate[head].expand(key)
            betas.append(1 / (1 + torch.exp(-gate[heads + head])))
            queries[-1] = queries[-1] / queries[-1].norm()
            keys[-1] = keys[-1] / keys[-1].norm()
        # rate * log2 of sigmoid: -rate at a logit of 0.
        decays.append(rate * torch.log2(1 / (1 + torch.exp(-logit))))

    def answer(query: Tensor, at: int, added: list[Tensor]) -> Tensor:
        """The answer to a query of the state of token `at`: what token j added has all decays behind j."""
        total = torch.zeros_like(values[0])
        decay = sum(decays[len(added) : at + 1], torch.zeros(key, dtype=torch.float64))
        for j in reversed(range(len(added))):
            total = total + (query * decay.exp() * keys[j]).sum() * added[j]
            decay = decay + decays[j]
        return total

    added: list[Tensor] = []
    for at in range(len(path)):
        v = values[at]
        if config.form == pb.LinearMixer.DELTA:
            v = betas[at] * (v - answer(keys[at], at, added))
        added.append(v)
    return answer(queries[-1], len(path) - 1, added) / math.sqrt(key)


def distances(name: str, path: list[Token], num_history: int) -> list[tuple[list[int], int | None]]:
    """For each token of a path to the last one: the steps of decay in between, and how far apart they are.

    None for a token that is not read: contextual tokens have no time.
    """
    last = path[-1]
    results: list[tuple[list[int], int | None]] = []
    for j, token in enumerate(path):
        between = path[j:]
        if name == "position":
            results.append(([1] * (len(between) - 1), len(between) - 1))
            continue
        if token.kind == "contextual":
            results.append(([], None))
            continue
        steps = [max(0, after.time - before.time) for before, after in pairwise(between)]
        results.append(([*steps, max(0, last.next_time - last.time)], last.next_time - token.time))
    return results


def weight(periods: tuple[int, ...], waves: Weights, head: int, steps: list[int], apart: int) -> Tensor:
    """A sum of damped waves; a step never damps by more than exp(-20)."""
    rates = math.log(2) / torch.tensor(periods, dtype=torch.float64) * torch.exp(waves["log_rate"])
    damped = sum((torch.clamp(-rates * step, min=-20) for step in steps), torch.zeros_like(rates))
    angles = [2 * math.pi * (apart % period) / period for period in periods]
    even, odd = (torch.tensor([f(x) for x in angles], dtype=torch.float64) for f in (math.cos, math.sin))
    return (damped.exp() * (waves["even"][head] * even + waves["odd"][head] * odd)).sum()
