"""DLRM-HSTU in float64, one row after the other: no batch, no layout, no padding, nothing of the package but
the messages of a config.

It reads a config as its user wrote it (so it also judges what the resolver fills in), plain rows and the
weights by name. What the specification leaves open is listed in `tokens`, `stack` and `layers`; beyond them:

- the fusion head compares the mixed target with the candidate's content as the encoder gave it: without the
  learned vector, position and age;
- the time of the timestamp postprocessor is sine and cosine of the day and then of the week, which begins on
  a Thursday, as 1970 did.

Heads other than `fusion` and mixers other than `hstu` and `mixture` have oracles of their own.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recsys import protos as pb
from tests.modules.pipelines import Row
from tests.oracle import stack
from tests.oracle.layers import Weights, concatenate, given, layer_norm, linear, mlp
from tests.oracle.tokens import Encoder, Token, channels


class BruteForceRanker:
    """The model that a config describes.

    Args:
        pipeline: as its user wrote it, not resolved.
        weights: float64, by their names in the model's state dict; with gradients if these are wanted.
    """

    def __init__(self, pipeline: pb.Pipeline, weights: Mapping[str, Tensor]):
        self.config = pipeline.model.ranker
        self.weights = Weights(weights)
        tables = {name.split(".")[-2]: table for name, table in weights.items() if name.startswith("embed.")}
        tables = {name.removesuffix("_table"): table for name, table in tables.items()}
        self.encoder = Encoder(pipeline, self.weights.at("preprocess"), tables)
        contextual, data = self.config.preprocessor.contextual, pipeline.data
        tokens_per_event = 2 if self.encoder.interleaved else 1
        num_contextual = sum(pb.USER in feature.sides for feature in pipeline.features)
        if contextual.HasField("joined_contextual"):
            num_contextual = contextual.joined_contextual.num_tokens
        longest = num_contextual + tokens_per_event * data.max_history_len + data.max_candidates
        max_seq_len = given(pipeline.model, "max_seq_len", longest)
        self.sizes = stack.Sizes(max_seq_len, tokens_per_event)
        self.num_logits = len(self.config.tasks)

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Logits [N, tasks] of all candidates of all rows."""
        actual = [logits for row in rows for logits in self.row(row)]
        return torch.stack(actual) if actual else torch.zeros(0, self.num_logits, dtype=torch.float64)

    def row(self, row: Row) -> list[Tensor]:
        """Logits [tasks] of each candidate."""
        candidates = self.encoder.candidates(row)
        sequences = [
            self.encoder.sequence(row, events, candidates)
            for events in channels(self.config.preprocessor.contextual, row)
        ]
        mixed = self.mix(sequences)
        return [
            self.head(self.postprocess(user, candidate.time), candidate.content)
            for user, candidate in zip(mixed, candidates, strict=True)
        ]

    def mix(self, sequences: list[list[Token]]) -> list[Tensor]:
        """The mixed vector of each target."""
        mixer, weights = self.config.mixer, self.weights.at("mix")
        if mixer.HasField("hstu"):
            return targets(stack.run(mixer.hstu, weights, sequences[0], self.sizes))
        outputs = []
        for number, (channel_stack, tokens) in enumerate(zip(mixer.mixture.stacks, sequences, strict=True)):
            stack_weights = weights.at("stacks", number)
            outputs.append(targets(stack.run(channel_stack.hstu, stack_weights, tokens, self.sizes)))
        return [linear(weights.at("fuse"), concatenate(parts)) for parts in zip(*outputs, strict=True)]

    def postprocess(self, x: Tensor, time: int) -> Tensor:
        chosen = self.config.postprocessor.WhichOneof("postprocessor")
        weights = self.weights.at("postprocess")
        if chosen is None:
            return x
        config = getattr(self.config.postprocessor, chosen)
        if chosen == "l2_norm":
            return x / max(torch.sqrt((x * x).sum()), config.eps)
        if chosen == "timestamp_layer_norm":
            local = time + 60 * config.utc_offset_minutes
            turns = [(local % period) / period for period in (86_400, 7 * 86_400)]
            cyclic = [f(2 * math.pi * turn) for turn in turns for f in (math.sin, math.cos)]
            x = x + weights.at("project")["weight"] @ torch.tensor(cyclic, dtype=torch.float64)
        return layer_norm(weights.at("norm"), x, config.eps)

    def head(self, user: Tensor, item: Tensor) -> Tensor:
        parts = [user * item]
        if self.config.head.fusion.input == pb.Head.CONCAT:
            parts = [user, item, user * item]
        return mlp(self.weights.at("head", "mlp"), concatenate(parts))


def targets(tokens: list[Token]) -> list[Tensor]:
    return [token.value for token in tokens if token.kind == "target"]
