"""`ContextualPreprocessor`: makes [contextual | history | targets], the sequence of a ranking model.

Contextual tokens are made of USER features: one token per feature, or several tokens from all features
together. An event is one token, content plus action (SUMMED), or two tokens, content and then action
(INTERLEAVED). A target is always one token, in training and in serving: the candidate's content plus a
learned vector in place of the action. The action is not known yet, so no label can leak into the token.

With channels, a row has a sequence for each channel: the same contextual and target tokens, and the channel's
events. All tokens are encoded once and then gathered into the sequences.
"""

import torch
from torch import Tensor, nn

from recsys import protos as pb
from recsys.config import checks, features
from recsys.config.registry import register
from recsys.data.batch import Batch, Channel, LayoutRule
from recsys.modules.action import ActionEncoder
from recsys.modules.content import ContentEncoder
from recsys.modules.flops import linear_flops
from recsys.modules.gated_mlp import ContextualizedMLP, RowContext
from recsys.modules.positional import PositionalEncoder
from recsys.modules.precision import product_dtype
from recsys.modules.prefix import Prefix
from recsys.modules.preprocessors.preprocessed import EncodedPrefix, Preprocessed, events_of
from recsys.modules.preprocessors.views import views
from recsys.modules.sequence import JaggedSequence
from recsys.modules.user_tokens import FeatureTokens, JoinedTokens
from recsys.ops import gather_rows


@register(pb.ContextualPreprocessor)
class ContextualPreprocessor(nn.Module):
    """Makes one sequence per row from the features of rows, events and candidates.

    Args:
        config: the message, which configures the encoders.
        pipeline: the resolved config, for features and `model.embedding_dim` (E).

    Raises:
        ValueError: INTERLEAVED is chosen without an action encoder, or an encoder does not fit the features.
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
        """Returns the layout of rows: contextual tokens, one or two tokens per event, and targets."""
        return LayoutRule(
            num_contextual=checks.num_contextual(pipeline),
            targets=True,
            tokens_per_event=checks.tokens_per_event(pipeline),
            channels=tuple(_channel(channel) for channel in config.channels),
        )

    def forward(self, inputs: dict[str, Tensor], batch: Batch) -> Preprocessed:
        """Returns the tokens of all rows and the candidates' content [N, E].

        The sequences of channels are joined. The content, to which nothing is added, is an input of the head.

        Args:
            inputs: column -> [n, width].
            batch: the batch, for numbers, times and actions.
        """
        users = self._users(inputs)
        prefix = [*self._contextual(inputs), *self._history(inputs, batch, users)]
        candidates = self._candidates(inputs, batch, users)
        encoded = [*prefix, candidates + self.target_action]
        return Preprocessed(self._sequence(encoded, batch), candidates)

    def prefix(self, inputs: dict[str, Tensor], batch: Batch) -> EncodedPrefix:
        """Returns the contextual and history tokens of `forward`.

        Args:
            inputs: column -> [n, width].
            batch: a batch without candidates.
        """
        users = self._users(inputs)
        encoded = [*self._contextual(inputs), *self._history(inputs, batch, users)]
        return EncodedPrefix(self._sequence(encoded, batch), Prefix.of(batch.sequences, users))

    def candidates(self, inputs: dict[str, Tensor], batch: Batch, prefix: Prefix) -> Preprocessed:
        """Returns the target tokens of `forward` and the candidates' content, given the prefix.

        The content has the dtype of its last matrix product: the same values as in `forward`, in less memory.

        Args:
            inputs: column -> [n, width].
            batch: a batch of nothing but candidates.
            prefix: the prefix of the same rows.
        """
        candidates = self._content(inputs, batch, prefix.users)
        values, times = _rounded_sum(candidates, self.target_action), batch.candidate_timestamps
        layout = batch.sequences
        if layout.parts:
            values, times = (torch.cat([column] * len(layout.parts)) for column in (values, times))
        if self.positional is not None:
            values = self.positional(values, layout, times, request_times=times, behind=prefix)
        return Preprocessed(JaggedSequence(self.dropout(_widened(values)), layout, times, times), candidates)

    def events(self, inputs: dict[str, Tensor], batch: Batch, prefix: Prefix) -> JaggedSequence:
        """Returns the tokens of `forward` for events later than those of `prefix`.

        Args:
            inputs: column -> [n, width].
            batch: a batch of nothing but events.
            prefix: the prefix of the same rows, before the events.

        Raises:
            NotExtendableError: the events would change the tokens of `prefix`; the message names the setting.
        """
        self.require_extendable()
        encoded = self._history(inputs, batch, prefix.users)
        return self._sequence(encoded, batch, behind=prefix)

    def require_extendable(self) -> None:
        """Checks that later events leave the tokens of a prefix unchanged.

        Raises:
            NotExtendableError: names the setting that prevents it.
        """
        if self.positional is not None:
            self.positional.require_extendable()

    def flops(self, batch: Batch) -> int:
        """Counts the FLOP of a forward pass; see `recsys.modules.flops`."""
        rows, events = batch.layout.batch_size, batch.uih_timestamps.shape[0]
        contextual = linear_flops(self.contextual, rows) if self.contextual is not None else 0
        action = self.action.flops(events, rows) if self.action is not None else 0
        sides = [self.content.flops(n, rows) for n in (events, batch.candidate_timestamps.shape[0])]
        return contextual + action + sum(sides)

    def _sequence(self, encoded: list[Tensor], batch: Batch, behind: Prefix | None = None) -> JaggedSequence:
        """Gathers encoded rows, several tensors in the order that `views` defines, into the sequences."""
        channels, layout = views(batch, self.tokens_per_event), batch.sequences
        inverse = channels[0].inverse if len(channels) == 1 else None
        index = [view.index for view in channels]
        values = gather_rows([_rounded(rows) for rows in encoded], index, inverse, complete=True)
        times = channels[0].times if len(channels) == 1 else torch.cat([view.times for view in channels])
        if self.positional is not None:
            values = self.positional(values, layout, times[:, 0], request_times=times[:, 2], behind=behind)
        return JaggedSequence(self.dropout(_widened(values)), layout, times[:, 0], times[:, 1])

    def _users(self, inputs: dict[str, Tensor]) -> Tensor | None:
        """Returns the features [B, C] from which contextualized layers compute weights, if there are any."""
        if not self.contextualized:
            return None
        return torch.cat([inputs[name] for name in self.user_columns], dim=1)

    def _contextual(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [] if self.contextual is None else [self.contextual(inputs)]

    def _history(self, inputs: dict[str, Tensor], batch: Batch, users: Tensor | None) -> list[Tensor]:
        """Returns one or two tensors [events, E], one for each token of an event."""
        rows = None if users is None else RowContext(users, events_of(batch, self.tokens_per_event))
        content = self.content(pb.HISTORY, inputs, batch.uih_timestamps.shape[0], rows)
        if self.action is None:
            return [content]
        action = self.action(batch.uih_actions, batch.uih_watch_time, rows)
        return [content, action] if self.interleaved else [content + action]

    def _candidates(self, inputs: dict[str, Tensor], batch: Batch, users: Tensor | None) -> Tensor:
        """Returns the candidates' content, [N, E] in at least float32."""
        return _widened(self._content(inputs, batch, users))

    def _content(self, inputs: dict[str, Tensor], batch: Batch, users: Tensor | None) -> Tensor:
        """Returns the candidates' content, [N, E] in the dtype of the last matrix product."""
        rows = None if users is None else RowContext(users, batch.layout.targets_only().layout)
        return self.content(pb.CANDIDATE, inputs, batch.candidate_timestamps.shape[0], rows)


def _rounded(tokens: Tensor) -> Tensor:
    """Casts to the matmul dtype; most tokens are already outputs of a matmul, so nothing is lost."""
    return tokens.to(product_dtype(tokens))


def _rounded_sum(tokens: Tensor, vector: Tensor) -> Tensor:
    """Adds in the wider dtype and casts to the matmul dtype, in one step if no gradients are needed."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _rounded(tokens + vector)
    return torch.add(tokens, vector, out=torch.empty_like(tokens, dtype=product_dtype(tokens)))


def _widened(tokens: Tensor) -> Tensor:
    """Casts to at least float32, for subsequent sums."""
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
