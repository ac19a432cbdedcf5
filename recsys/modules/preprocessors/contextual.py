"""`ContextualPreprocessor`: [contextual | history | targets], the sequence of a ranking model.

Contextual tokens are made of USER features, one a feature or a number of joint ones. An event is one token,
content plus what the user did with the item (SUMMED), or two, content and then action (INTERLEAVED). A target
is one token either way, in training and in serving: the candidate's content plus one learned vector in place
of the action, which nobody knows yet, so no label can leak into it.

With channels a row has several sequences in place of one: the same contextual and target tokens, and some of
the events. All tokens are encoded once and then gathered into the sequences.
"""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.registry import register
from recsys.data.batch import Batch, Channel, LayoutRule
from recsys.modules.action import ActionEncoder
from recsys.modules.cache import Prefix
from recsys.modules.content import ContentEncoder
from recsys.modules.flops import linear_flops
from recsys.modules.gated_mlp import ContextualizedMLP, RowContext
from recsys.modules.positional import PositionalEncoder
from recsys.modules.precision import product_dtype
from recsys.modules.preprocessors.preprocessed import EncodedPrefix, Preprocessed, events_of, inputs_of
from recsys.modules.preprocessors.views import views
from recsys.modules.sequence import JaggedSequence
from recsys.modules.user_tokens import FeatureTokens, JoinedTokens
from recsys.ops import gather_rows


@register(pb.ContextualPreprocessor)
class ContextualPreprocessor(nn.Module):
    """Features of rows, events and candidates to one sequence a row.

    Args:
        config: its encoders.
        pipeline: resolved; features and `model.embedding_dim` (E).

    Raises:
        ValueError: actions are to be tokens without an action encoder, or a part does not fit the features.
    """

    def __init__(self, config: pb.ContextualPreprocessor, *, pipeline: pb.Pipeline):
        super().__init__()
        width = pipeline.model.embedding_dim
        users = features.columns(pipeline, pb.USER)
        self.user_columns = [column.name for column in users]
        self.contextual = _contextual_tokens(config, users, width)
        self.content = ContentEncoder(config, pipeline=pipeline)
        self.action = None
        if config.HasField("action"):
            context_dim = sum(column.width for column in users)
            self.action = ActionEncoder(config.action, embedding_dim=width, context_dim=context_dim)
        self.contextualized = any(isinstance(part, ContextualizedMLP) for part in self.modules())
        self.interleaved = config.action_placement == pb.ContextualPreprocessor.INTERLEAVED
        if self.interleaved and self.action is None:
            raise ValueError("action_placement: INTERLEAVED makes a token of each action; set `action`")
        self.tokens_per_event = 2 if self.interleaved else 1
        self.target_action = nn.Parameter(torch.empty(width))
        nn.init.normal_(self.target_action, std=width**-0.5)
        self.positional = None
        if config.HasField("positional"):
            self.positional = PositionalEncoder(config.positional, embedding_dim=width)
        self.dropout = nn.Dropout(config.dropout)

    @staticmethod
    def layout_rule(config: pb.ContextualPreprocessor, pipeline: pb.Pipeline) -> LayoutRule:
        """Contextual tokens, one or two tokens an event; candidates are targets."""
        return LayoutRule(
            num_contextual=checks.num_contextual(pipeline),
            targets=True,
            tokens_per_event=checks.tokens_per_event(pipeline),
            channels=tuple(_channel(channel) for channel in config.channels),
        )

    def forward(self, embeddings: dict[str, Tensor], batch: Batch) -> Preprocessed:
        """Tokens of every row, and what the head compares them with.

        Args:
            embeddings: column -> [n, width].
            batch: numbers, times and actions.

        Returns:
            The sequence (those of all channels, joined), and the candidates' content [N, E] before anything
            was added to it.
        """
        inputs = inputs_of(embeddings, batch)
        users = self._users(inputs)
        prefix = [*self._contextual(inputs), *self._history(inputs, batch, users)]
        candidates = self._candidates(inputs, batch, users)
        encoded = [*prefix, candidates + self.target_action]
        return Preprocessed(self._sequence(encoded, batch), candidates)

    def prefix(self, embeddings: dict[str, Tensor], batch: Batch) -> EncodedPrefix:
        """The contextual and history tokens of `forward`.

        Args:
            embeddings: column -> [n, width].
            batch: without candidates.
        """
        inputs = inputs_of(embeddings, batch)
        users = self._users(inputs)
        encoded = [*self._contextual(inputs), *self._history(inputs, batch, users)]
        return EncodedPrefix(self._sequence(encoded, batch), Prefix.of(batch.sequences, users))

    def candidates(self, embeddings: dict[str, Tensor], batch: Batch, prefix: Prefix) -> Preprocessed:
        """The target tokens of `forward`, and the content of candidates in the type of its last product: the
        numbers of `forward`, in less memory.

        Args:
            embeddings: column -> [n, width].
            batch: nothing but candidates.
            prefix: of the same rows.
        """
        candidates = self._content(inputs_of(embeddings, batch), batch, prefix.users)
        values, times = _rounded_sum(candidates, self.target_action), batch.candidate_timestamps
        layout = batch.sequences
        if layout.parts:
            values, times = (torch.cat([one] * len(layout.parts)) for one in (values, times))
        if self.positional is not None:
            values = self.positional(values, layout, times, request_times=times, behind=prefix)
        return Preprocessed(JaggedSequence(self.dropout(_widened(values)), layout, times, times), candidates)

    def events(self, embeddings: dict[str, Tensor], batch: Batch, prefix: Prefix) -> JaggedSequence:
        """The tokens of `forward` of events that have happened since.

        Args:
            embeddings: column -> [n, width].
            batch: nothing but events.
            prefix: of the same rows, before the events.

        Raises:
            ValueError: the events change the tokens of `prefix`, naming the setting.
        """
        if self.positional is not None:
            self.positional.require_extendable()
        encoded = self._history(inputs_of(embeddings, batch), batch, prefix.users)
        return self._sequence(encoded, batch, behind=prefix)

    def flops(self, batch: Batch) -> int:
        """FLOP of a forward pass; see `recsys.modules.flops`."""
        rows, events = batch.layout.batch_size, batch.uih_timestamps.shape[0]
        contextual = linear_flops(self.contextual, rows) if self.contextual is not None else 0
        action = self.action.flops(events, rows) if self.action is not None else 0
        sides = [self.content.flops(n, rows) for n in (events, batch.candidate_timestamps.shape[0])]
        return contextual + action + sum(sides)

    def _sequence(self, encoded: list[Tensor], batch: Batch, behind: Prefix | None = None) -> JaggedSequence:
        """Encoded rows, in several tensors in the order of `views`, as the sequences of the batch."""
        found, layout = views(batch, self.tokens_per_event), batch.sequences
        inverse = found[0].inverse if len(found) == 1 else None
        values = gather_rows([_rounded(one) for one in encoded], [view.index for view in found], inverse)
        times = found[0].times if len(found) == 1 else torch.cat([view.times for view in found])
        if self.positional is not None:
            values = self.positional(values, layout, times[:, 0], request_times=times[:, 2], behind=behind)
        return JaggedSequence(self.dropout(_widened(values)), layout, times[:, 0], times[:, 1])

    def _users(self, inputs: dict[str, Tensor]) -> Tensor | None:
        """[B, C], what weights are made of."""
        if not self.contextualized:
            return None
        return torch.cat([inputs[name] for name in self.user_columns], dim=1)

    def _contextual(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [] if self.contextual is None else [self.contextual(inputs)]

    def _history(self, inputs: dict[str, Tensor], batch: Batch, users: Tensor | None) -> list[Tensor]:
        """[events, E], for each token that an event has."""
        rows = None if users is None else RowContext(users, events_of(batch, self.tokens_per_event))
        content = self.content(pb.HISTORY, inputs, batch.uih_timestamps.shape[0], rows)
        if self.action is None:
            return [content]
        action = self.action(batch.uih_actions, batch.uih_watch_time, rows)
        return [content, action] if self.interleaved else [content + action]

    def _candidates(self, inputs: dict[str, Tensor], batch: Batch, users: Tensor | None) -> Tensor:
        """[N, E], content."""
        return _widened(self._content(inputs, batch, users))

    def _content(self, inputs: dict[str, Tensor], batch: Batch, users: Tensor | None) -> Tensor:
        """[N, E], in the type of the last product."""
        rows = None if users is None else RowContext(users, batch.layout.targets_only().layout)
        return self.content(pb.CANDIDATE, inputs, batch.candidate_timestamps.shape[0], rows)


def _rounded(tokens: Tensor) -> Tensor:
    """In the type of matrix products: of most tokens the last one gave the numbers."""
    return tokens.to(product_dtype(tokens))


def _rounded_sum(tokens: Tensor, vector: Tensor) -> Tensor:
    """`_rounded` of a sum in the wider type, in one step where no gradients are asked for."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _rounded(tokens + vector)
    return torch.add(tokens, vector, out=torch.empty_like(tokens, dtype=product_dtype(tokens)))


def _widened(tokens: Tensor) -> Tensor:
    """In float32 at least, for sums and whatever follows."""
    return tokens.to(torch.promote_types(tokens.dtype, torch.float32))


def _contextual_tokens(
    config: pb.ContextualPreprocessor, columns: list[features.Column], embedding_dim: int
) -> FeatureTokens | JoinedTokens | None:
    if config.HasField("joined_contextual"):
        return JoinedTokens(config.joined_contextual, columns, embedding_dim=embedding_dim)
    return FeatureTokens(columns, embedding_dim=embedding_dim) if columns else None


def _channel(config: pb.HistoryChannel) -> Channel:
    return Channel(
        config.name,
        bits=sum(1 << bit for bit in set(config.bits)),
        min_watch_time=config.min_watch_time if config.HasField("min_watch_time") else None,
        max_events=config.max_events if config.HasField("max_events") else None,
    )
