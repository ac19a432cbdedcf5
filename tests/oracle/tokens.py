"""From a plain row to the tokens of its sequences, one token at a time.

Written from sections 1, 6, 7 and 8 of the specification and from the comments of the config language.
What they leave open, and what is meant here:

- positions that count backward: contextual tokens have 0..C-1, all targets C, the newest history token C + 1.
  With origin START history goes on from C, and all targets share the place behind its newest token.
- A candidate's own request time is its timestamp: its age is 0, and `t_next` is that time too.
- A contextual token's time, and that of the token after it, is the row's request time, also for the last one
  with history behind it.
- The token after the content of an interleaved event is its action, at the event's time; after the newest
  event comes the row's request, whatever the candidates' times are.
- The tokens of several channels know nothing of each other: positions and next times are each channel's own.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys import protos as pb
from tests.modules.pipelines import Row
from tests.oracle.layers import Weights, concatenate, contextualized, linear, mlp, number

COLUMN = {pb.USER: "", pb.HISTORY: "uih_", pb.CANDIDATE: "candidate_"}


class Token(NamedTuple):
    """A token on its way through the model; `place` counts tokens of its kind, oldest first."""

    kind: str
    place: int
    time: int
    next_time: int
    value: Tensor


class Candidate(NamedTuple):
    """A candidate's content, which a head compares with, and when it is asked for."""

    content: Tensor
    time: int


class Encoder:
    """Tokens of one row.

    Args:
        pipeline: as its user wrote it.
        weights: of the preprocessor.
        tables: of the embeddings, by the table's name.
    """

    def __init__(self, pipeline: pb.Pipeline, weights: Weights, tables: dict[str, Tensor]):
        self.config = pipeline.model.ranker.preprocessor.contextual
        self.features = list(pipeline.features)
        self.width = pipeline.model.embedding_dim
        self.weights, self.tables = weights, tables
        self.interleaved = self.config.action_placement == pb.ContextualPreprocessor.INTERLEAVED

    def candidates(self, row: Row) -> list[Candidate]:
        times = row.candidate_timestamps
        return [Candidate(self.content(row, pb.CANDIDATE, i), time) for i, time in enumerate(times)]

    def sequence(self, row: Row, events: list[int], candidates: list[Candidate]) -> list[Token]:
        """[contextual | history | targets], with these events of the row."""
        now = row.request_time
        contextual = [Token("contextual", i, now, now, x) for i, x in enumerate(self.contextual(row))]
        history: list[Token] = []
        times = [row.uih_timestamps[event] for event in events]
        for event, time, after in zip(events, times, [*times, now][1:], strict=True):
            parts = [(self.content(row, pb.HISTORY, event), after)]
            if self.config.HasField("action"):
                (content, _), action = parts[0], self.action(row, event)
                parts = (
                    [(content, time), (action, after)] if self.interleaved else [(content + action, after)]
                )
            for value, next_time in parts:
                history.append(Token("history", len(history), time, next_time, value))
        targets = [
            Token(
                "target", i, candidate.time, candidate.time, candidate.content + self.weights["target_action"]
            )
            for i, candidate in enumerate(candidates)
        ]
        tokens = [*contextual, *history, *targets]
        if not self.config.HasField("positional"):
            return tokens
        sizes = (len(contextual), len(history))
        return [token._replace(value=self.placed(token, sizes, now)) for token in tokens]

    def contextual(self, row: Row) -> list[Tensor]:
        """A token a USER feature, or all of them together in a number of tokens."""
        project = self.weights.at("contextual", "project")
        users = [feature for feature in self.features if pb.USER in feature.sides]
        if self.config.HasField("joined_contextual"):
            return list(mlp(project, self.user(row)).split(self.width))
        return [linear(project.at(f"{f.name}_token"), self.entry(f, row.values[f.name])) for f in users]

    def user(self, row: Row) -> Tensor:
        """All USER features side by side."""
        users = [feature for feature in self.features if pb.USER in feature.sides]
        return concatenate(self.entry(feature, row.values[feature.name]) for feature in users)

    def content(self, row: Row, side: Any, place: int) -> Tensor:
        """An event's or candidate's item, E wide."""
        parts = []
        for feature in self.features:
            column = COLUMN[side] + feature.name
            if side in feature.sides:
                parts.append(self.entry(feature, row.values[column][place]))
            elif pb.HISTORY in feature.sides or pb.CANDIDATE in feature.sides:
                parts.append(self.weights.at("content", "missing")[column])
        x, project = concatenate(parts), self.weights.at("content", "project")
        chosen = self.config.WhichOneof("content_encoder")
        if chosen == "content_slice":
            return x[: self.width]
        if chosen == "content_pad":
            return x if len(x) == self.width else concatenate([x, project["filling"]])
        if chosen == "content_contextualized":
            return contextualized(self.config.content_contextualized, project, x, self.user(row))
        return mlp(project, x)

    def entry(self, feature: pb.Feature, value: Any) -> Tensor:
        """The vector of one value: a normalised number, or rows of a table."""
        if feature.HasField("numeric"):
            return number(value)
        table = self.tables[feature.id.table or feature.name]
        if not feature.id.multi_valued:
            return table[value]
        total = sum((table[item] for item in value), torch.zeros_like(table[0]))
        return total / max(1, len(value)) if feature.id.pooling == pb.MEAN else total

    def action(self, row: Row, event: int) -> Tensor:
        """The vector of the user's action on an event's item."""
        config, weights = self.config.action, self.weights.at("action")
        done = [row.uih_actions[event] // 2**bit.bit % 2 == 1 for bit in config.bits]
        done += [number(row.uih_watch_time[event]) >= limit for limit in config.watch_time_thresholds]
        vectors = [vector if yes else 0 * vector for yes, vector in zip(done, weights["weight"], strict=True)]
        if not config.HasField("concatenated"):
            return sum(vectors)
        layers, project, x = config.concatenated, weights.at("project"), concatenate(vectors)
        if layers.HasField("contextualized"):
            return contextualized(layers.contextualized, project, x, self.user(row))
        return mlp(project, x)

    def placed(self, token: Token, sizes: tuple[int, int], now: int) -> Tensor:
        """x * sqrt(E) + position[p] + time[b]."""
        config, weights = self.config.positional, self.weights.at("positional")
        num_contextual, num_history = sizes
        if token.kind == "contextual":
            position = token.place
        elif config.origin == pb.PositionalEncoder.START:
            position = num_contextual + (token.place if token.kind == "history" else num_history)
        else:
            position = num_contextual + (num_history - token.place if token.kind == "history" else 0)
        table = weights.at("position")["weight"]
        value = token.value * math.sqrt(self.width) + table[min(position, len(table) - 1)]
        if config.num_time_buckets == 0:
            return value
        age = 0 if token.kind == "target" else now - token.time
        return value + weights.at("time")["weight"][self.bucket(token.kind, age)]

    def bucket(self, kind: str, age: int) -> int:
        config = self.config.positional
        if kind == "contextual":
            return config.num_time_buckets
        units = age / config.time_unit
        logarithmic = config.time_scale == pb.PositionalEncoder.LOG
        actual = math.log(max(1, units)) if logarithmic else math.sqrt(max(0, units))
        return min(math.floor(actual), config.num_time_buckets - 1)


def channels(config: pb.ContextualPreprocessor, row: Row) -> list[list[int]]:
    """The events of each channel, oldest first; of the only one when none is named."""
    everything = list(range(len(row.uih_timestamps)))
    results = []
    for channel in config.channels:

        def belongs(event: int, channel: pb.HistoryChannel = channel) -> bool:
            if any(row.uih_actions[event] // 2**bit % 2 for bit in channel.bits):
                return True
            if channel.HasField("min_watch_time"):
                return bool(number(row.uih_watch_time[event]) >= channel.min_watch_time)
            return not channel.bits

        kept = [event for event in everything if belongs(event)]
        if channel.HasField("max_events"):
            kept = kept[max(0, len(kept) - channel.max_events) :]
        results.append(kept)
    return results or [everything]
