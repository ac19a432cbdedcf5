"""`LinearLayer`: the layer that `LinearMixer` stacks, linear attention with a gate and a feed-forward part.

With n = norm(x) and u, v, q, k = silu(W n):

    a = heads of [recurrence(q, k, v) | time channel(v) | position channel(v)], each head normalized alone
    x = x + W_o dropout(u * a)
    x = x + W_3 dropout(silu(W_1 m) * W_2 m) with m = norm(x)

Sources: HSTU for the gate (arXiv 2402.17152); FuXi-alpha for channels that share v and for the second stage
(arXiv 2502.03036); FuXi-Linear for channels of linear cost (arXiv 2602.23671).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys.modules.distance_channels import Clock, DistanceChannel
from recsys.modules.flops import linear_flops
from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.ops import SequenceLayout, gated_norm, linear_attention

Form = Literal["retention", "gated", "delta"]

SLOWEST = 10
"""Initial decay rates lie between 2^-SLOWEST and 1 per token; their exponents are spread over the heads."""


class Recurrence(NamedTuple):
    """The inputs of one call of `linear_attention`.

    Attributes:
        q, k: [T, heads, D].
        v: [T, heads, V].
        log_decay: [T, heads, D] or [T, heads].
        beta: [T, heads]; None without the delta rule.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None


class Proceeded(NamedTuple):
    """The result of a layer for tokens that follow others.

    Attributes:
        values: [T, E].
        states: for each recurrence, the state after the history, [B, heads, D, V] in float32 or wider.
    """

    values: Tensor
    states: tuple[Tensor, ...]


class LinearConfig(NamedTuple):
    """Sizes and settings of a layer.

    Attributes:
        num_heads: H.
        qk_dim: D, width of a query and key in each head.
        v_dim: V, width of a value in each head.
        form: how a state decays: "retention" at a learned rate per head; "gated" at a rate per channel that
            each token computes; "delta" at a rate per head that each token computes, and the token also
            replaces the state's answer to its key.
        feed_forward_dim: hidden width of the second stage; 0 leaves it out.
        dropout: probability of dropout before the output projections, in training.
        backend: the backend of `linear_attention`.
    """

    num_heads: int
    qk_dim: int
    v_dim: int
    form: Form
    feed_forward_dim: int
    dropout: float
    backend: str


class LinearLayer(nn.Module):
    """Holds the parameters of a layer and computes it.

    Args:
        embedding_dim: E.
        config: sizes and settings.
        channels: for each further channel, by name, the periods of its clock.
    """

    def __init__(self, embedding_dim: int, config: LinearConfig, channels: Mapping[str, Sequence[int]]):
        super().__init__()
        num_heads, qk_dim, v_dim, form, feed_forward_dim, dropout, backend = config
        self.num_heads, self.qk_dim, self.v_dim = num_heads, qk_dim, v_dim
        self.form, self.backend = form, backend
        key_width, value_width = num_heads * qk_dim, num_heads * v_dim
        gated_width = value_width * (1 + len(channels))
        gates = {"retention": 0, "gated": key_width, "delta": 2 * num_heads}[form]
        self.widths = [gated_width, value_width, key_width, key_width, gates]
        self.input_norm = LayerNorm(embedding_dim)
        self.uvqk = nn.Linear(embedding_dim, sum(self.widths))
        exponents = (torch.arange(num_heads) + 0.5) * (SLOWEST / num_heads)
        self.register_buffer("first_rate", 2.0**-exponents, persistent=False)
        self.log_rate = nn.Parameter(torch.zeros(num_heads))
        self.channels = nn.ModuleDict(
            {name: DistanceChannel(periods, num_heads) for name, periods in channels.items()}
        )
        self.norm = HeadNorm(num_heads * (1 + len(channels)), v_dim)
        self.output = nn.Linear(gated_width, embedding_dim)
        self.dropout = nn.Dropout(dropout)
        self.feed_forward = (
            FeedForward(embedding_dim, feed_forward_dim, dropout) if feed_forward_dim else None
        )
        for linear in (self.uvqk, self.output):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, layout: SequenceLayout, clocks: Mapping[str, Clock]) -> Tensor:
        """Maps [T, E] to [T, E].

        Args:
            x: the tokens.
            layout: layout of the tokens.
            clocks: a clock for each channel.
        """
        return self.proceed(x, layout, clocks).values

    def proceed(
        self,
        x: Tensor,
        layout: SequenceLayout,
        clocks: Mapping[str, Clock],
        states: Sequence[Tensor] | None = None,
    ) -> Proceeded:
        """Runs `forward` on tokens that follow others.

        Args:
            x: the tokens, [T, E].
            layout: layout of the tokens.
            clocks: a clock for each channel.
            states: the states after the tokens before, in the shapes of `state_shapes`; None for zeros.
        """
        u, recurrences = self.project(x, clocks)
        results = [
            linear_attention(
                r.q, r.k, r.v, r.log_decay, layout, beta=r.beta, initial_state=state, backend=self.backend
            )
            for r, state in zip(recurrences, states or [None] * len(recurrences), strict=True)
        ]
        values = self.finish(x, u, torch.cat([result.out for result in results], dim=1))
        return Proceeded(values, tuple(result.final_state for result in results))

    @property
    def state_shapes(self) -> list[list[int]]:
        """The shape [heads, D, V] of a sample's state in each recurrence of `project`."""
        shapes = [[self.num_heads, self.qk_dim, self.v_dim]]
        if self.channels:
            (width,) = {2 * channel.num_periods for channel in self.channels.values()}
            shapes.append([self.num_heads * len(self.channels), width, self.v_dim])
        return shapes

    def project(self, x: Tensor, clocks: Mapping[str, Clock]) -> tuple[Tensor, list[Recurrence]]:
        """Runs the first half of `forward`.

        Returns:
            u before its activation, [T, channels x H x V], and the recurrences: one for the tokens' content,
            and one for all further channels if there are any.
        """
        u, v, q, k, gates = self.uvqk(self.input_norm(x)).split(self.widths, dim=1)
        v, q, k = (F.silu(part).unflatten(1, (self.num_heads, -1)) for part in (v, q, k))
        recurrences = [self._by_content(q, k, v, gates)]
        if self.channels:
            inputs = [channel(clocks[name]) for name, channel in self.channels.items()]
            queries, keys, decays = (torch.cat(list(parts), dim=1) for parts in zip(*inputs, strict=True))
            values = torch.cat([v] * len(inputs), dim=1)
            recurrences.append(Recurrence(queries.to(v.dtype), keys.to(v.dtype), values, decays))
        return u, recurrences

    def finish(self, x: Tensor, u: Tensor, attended: Tensor) -> Tensor:
        """Runs the second half of `forward`.

        Args:
            x: the layer's input, [T, E].
            u: the result of `project`.
            attended: outputs of the recurrences side by side, [T, channels x H, V].
        """
        gated = gated_norm(
            attended.flatten(1),
            u,
            self.norm.weight,
            self.norm.bias,
            num_groups=self.norm.num_heads,
            eps=self.norm.eps,
            gate="ugn",
            dropout=self.dropout.p if self.training else 0.0,
            silu=True,
        )
        x = x + self.output(gated)
        return x if self.feed_forward is None else x + self.feed_forward(x)

    def flops(self, num_tokens: int) -> int:
        """Counts the FLOP for T tokens; see `recsys.modules.flops`.

        Each head adds a token to its state and answers the query; with the delta rule, it also answers the
        key.
        """
        content = (6 if self.form == "delta" else 4) * self.qk_dim
        waves = sum(4 * 2 * channel.num_periods for channel in self.channels.values())
        states = num_tokens * self.num_heads * self.v_dim * (content + waves)
        return linear_flops(self, num_tokens) + states

    def _by_content(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Recurrence:
        """Returns the recurrence over the tokens' content. A gate of 0 decays at the head's learned rate."""
        real = torch.promote_types(v.dtype, torch.float32)
        rate = (self.first_rate * self.log_rate.exp()).to(real)
        gates = gates.to(real)
        if self.form == "retention":
            return Recurrence(q, k, v, -rate.expand(q.shape[:2]))
        if self.form == "gated":
            forgets = F.softplus(-gates).unflatten(1, (self.num_heads, -1)) / math.log(2)
            return Recurrence(q, k, v, -rate[:, None] * forgets)
        forgets, beta = gates.split(self.num_heads, dim=1)
        # CUDA's autocast computes lengths in float32, and returns them so.
        q, k = (F.normalize(part, dim=2).to(v.dtype) for part in (q, k))
        return Recurrence(q, k, v, -rate * F.softplus(-forgets) / math.log(2), beta.sigmoid())


class FeedForward(nn.Module):
    """Computes W_3 dropout(silu(W_1 m) * W_2 m) with m = norm(x), [T, E] -> [T, E]."""

    def __init__(self, embedding_dim: int, hidden: int, dropout: float):
        super().__init__()
        self.norm = LayerNorm(embedding_dim)
        self.widen = nn.Linear(embedding_dim, 2 * hidden)
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(hidden, embedding_dim)
        for linear in (self.widen, self.narrow):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, values = self.widen(self.norm(x)).chunk(2, dim=1)
        return self.narrow(self.dropout(F.silu(gate) * values))
