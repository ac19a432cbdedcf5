"""`STULayer`: one sequential transduction unit, the layer that HSTU stacks.

Source: Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152. How tokens see each other is handed
in as a function, so the layer is the same with any mask, bias or kernel.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.modules.sequence import JaggedSequence
from recsys.ops import RelativeBias

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over the tokens at hand: q, k [T, H, D], v [T, H, V] -> [T, H, V]."""


class STULayer(nn.Module):
    """x + project(dropout(gate(u, norm(attention(q, k, v))))), with u, v, q, k from one projection of
    norm(x).

    Args:
        embedding_dim: E.
        num_heads: H.
        qk_dim: D, width of a query and key in each head.
        v_dim: V, width of a value in each head.
        activation: "u": only u goes through SiLU (production form); "uvqk": all four (research form).
        norm: "layer": over H * V; "group": each head by itself.
        gate: what is projected: "ugn": u * norm(a), with an output bias (research form); "concat": [u, a, u
            * norm(a)] (production form).
        dropout: probability before the output projection, in training.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        num_heads: int,
        qk_dim: int,
        v_dim: int,
        activation: Literal["u", "uvqk"] = "u",
        norm: Literal["layer", "group"] = "layer",
        gate: Literal["ugn", "concat"] = "concat",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.activation = activation
        self.gate = gate
        self.dropout = nn.Dropout(dropout)
        value_width, key_width = num_heads * v_dim, num_heads * qk_dim
        self.widths = [value_width, value_width, key_width, key_width]
        self.input_norm = LayerNorm(embedding_dim)
        self.uvqk = nn.Linear(embedding_dim, sum(self.widths))
        self.norm = LayerNorm(value_width) if norm == "layer" else HeadNorm(num_heads, v_dim)
        gated_width = 3 * value_width if gate == "concat" else value_width
        self.output = nn.Linear(gated_width, embedding_dim, bias=gate == "ugn")
        for linear in (self.uvqk, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        uvqk = self.uvqk(self.input_norm(x))
        if self.activation == "uvqk":
            uvqk = F.silu(uvqk)
        u, v, q, k = uvqk.split(self.widths, dim=1)
        if self.activation == "u":
            u = F.silu(u)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v))
        attended = attend(q, k, v).flatten(1)
        gated = u * self.norm(attended)
        if self.gate == "concat":
            gated = torch.cat([u, attended, gated], dim=1)
        return x + self.output(self.dropout(gated))


class RelativeBiasTables(nn.Module):
    """The learned tables of `recsys.ops.RelativeBias` for one layer.

    Args:
        num_positions: P, rows of the position table.
        num_time_buckets: K, rows of the time table; 0 leaves time out.
        num_heads: a row of tables for each head; None shares one row over heads.
    """

    def __init__(self, num_positions: int, num_time_buckets: int, num_heads: int | None = None):
        super().__init__()
        rows = () if num_heads is None else (num_heads,)
        self.position = nn.Parameter(torch.empty(*rows, num_positions))
        nn.init.normal_(self.position, std=0.02)
        if num_time_buckets:
            self.time = nn.Parameter(torch.empty(*rows, num_time_buckets))
            nn.init.normal_(self.time, std=0.02)
        else:
            self.register_buffer("time", torch.zeros(*rows, 1), persistent=False)

    def forward(self, sequence: JaggedSequence) -> RelativeBias:
        """The tables with the times of a batch."""
        return RelativeBias(self.position, self.time, sequence.timestamps, sequence.next_timestamps)
