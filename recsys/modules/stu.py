"""`STULayer`: one sequential transduction unit, the layer that HSTU stacks.

Source: Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152. How tokens see each other is handed
in as a function, so the layer is the same with any mask, bias or kernel.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.modules.recompute import Watch, rebuilt_in_backward
from recsys.modules.sequence import JaggedSequence
from recsys.ops import RelativeBias, norm_mul_dropout

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention over the tokens at hand: q, k [T, H, D], v [T, H, V] -> [T, H, V]."""


@dataclass(frozen=True)
class STUForm:
    """Which of the published forms a layer has.

    Attributes:
        activation: "u": only u goes through SiLU (production form); "uvqk": all four (research form).
        norm: of attention's output: "layer": over H * V; "group": each head by itself.
        gate: what is projected: "ugn": u * norm(a), with an output bias (research form); "concat": [u, a, u
            * norm(a)] (production form).
    """

    activation: Literal["u", "uvqk"] = "u"
    norm: Literal["layer", "group"] = "layer"
    gate: Literal["ugn", "concat"] = "concat"


class STULayer(nn.Module):
    """x + project(dropout(gate(u, norm(attention(q, k, v))))), with u, v, q, k from one projection of
    norm(x).

    Args:
        embedding_dim: E.
        num_heads: H.
        qk_dim: D, width of a query and key in each head.
        v_dim: V, width of a value in each head.
        form: activation, norm and gate.
        dropout: probability before the output projection, in training.
        recompute: what backward computes again, from x and attention's output a, instead of keeping it:
            "normed_x" (norm(x)), "uvqk" (the projection, also behind its activation), "gated" (norm(a), gate
            and dropout). Attention itself never runs again, and gradients are the same. A traced graph
            ignores it: compilers decide for themselves.
        compiled: whether `torch.compile` makes fewer kernels of what stands in front of attention. One graph
            serves all layers of a form and all numbers of tokens.

    Raises:
        ValueError: `compiled` with "normed_x" or "uvqk" in `recompute`.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        num_heads: int,
        qk_dim: int,
        v_dim: int,
        form: STUForm = STUForm(),
        dropout: float = 0.0,
        recompute: Collection[Literal["normed_x", "uvqk", "gated"]] = (),
        compiled: bool = False,
    ):
        super().__init__()
        if compiled and {"normed_x", "uvqk"} & set(recompute):
            raise ValueError(
                "compile: what is compiled is not computed again: set compile to false, or leave NORMED_X "
                "and UVQK out of recompute"
            )
        self.compiled = compiled
        self.num_heads = num_heads
        self.form = form
        self.recompute = frozenset(recompute)
        self.dropout = nn.Dropout(dropout)
        value_width, key_width = num_heads * v_dim, num_heads * qk_dim
        self.widths = [value_width, value_width, key_width, key_width]
        self.input_norm = LayerNorm(embedding_dim)
        self.uvqk = nn.Linear(embedding_dim, sum(self.widths))
        self.norm = LayerNorm(value_width) if form.norm == "layer" else HeadNorm(num_heads, v_dim)
        gated_width = 3 * value_width if form.gate == "concat" else value_width
        self.output = nn.Linear(gated_width, embedding_dim, bias=form.gate == "ugn")
        for linear in (self.uvqk, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, attend: Attend, scale: Tensor | None = None) -> Tensor:
        """[T, E] -> [T, E]; `scale` [T, 1] is a factor of what is added to x."""
        if "uvqk" not in self._recomputed():
            u, q, k, v = self.project(x)
            return self.finish(x, u, attend(q, k, v), scale)
        joined = self._join(x)
        with rebuilt_in_backward(partial(self._all_projected, x.detach()), x.device.type) as watch:
            u, q, k, v = self._divide(joined, watch)
            return self.finish(x, u, attend(q, k, v), scale)

    def project(self, x: Tensor) -> "Projected":
        """The first half of `forward`, for layers that share one attention; keeps u, q, k and v."""
        if self.compiled and x.shape[0] > 1 and not torch.compiler.is_compiling():
            return self._heads(*_compiled_front()(self, x))
        return self._divide(self._join(x))

    def finish(self, x: Tensor, u: Tensor, attended: Tensor, scale: Tensor | None = None) -> Tensor:
        """The second half of `forward`: [T, E] from u [T, H * V] and attention's output [T, H, V]."""
        attended = attended.flatten(1)
        if "gated" in self._recomputed():
            random = self.training and self.dropout.p > 0
            branch = checkpoint(
                self._gate_and_project, u, attended, use_reentrant=False, preserve_rng_state=random
            )
        else:
            branch = self._gate_and_project(u, attended)
        if scale is not None:
            branch = (scale * branch).to(x.dtype)
        return x + branch

    def _recomputed(self) -> Collection[str]:
        eager_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return self.recompute if eager_training else ()

    def _join(self, x: Tensor) -> Tensor:
        """u, v, q and k before their activation, side by side."""
        if "normed_x" in self._recomputed():
            return checkpoint(self._project, x, use_reentrant=False, preserve_rng_state=False)
        return self._project(x)

    def _project(self, x: Tensor) -> Tensor:
        return self.uvqk(self.input_norm(x))

    def _divide(self, joined: Tensor, watch: Watch | None = None) -> "Projected":
        if watch is not None:
            watch([joined])
        u, v, q, k = self._split(joined)
        if watch is not None:
            watch([joined, u, v, q, k])
        return self._heads(u, v, q, k)

    def _heads(self, u: Tensor, v: Tensor, q: Tensor, k: Tensor) -> "Projected":
        return Projected(u, *(part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v)))

    def _split(self, joined: Tensor) -> list[Tensor]:
        """u, v, q and k behind their activation, each [T, H * its width]."""
        if self.form.activation == "uvqk":
            return list(F.silu(joined).split(self.widths, dim=1))
        u, v, q, k = joined.split(self.widths, dim=1)
        return [F.silu(u), v, q, k]

    def _all_projected(self, x: Tensor) -> list[Tensor]:
        """All that `rebuilt_in_backward` watches."""
        joined = self._project(x)
        return [joined, *self._split(joined)]

    def _gate_and_project(self, u: Tensor, attended: Tensor) -> Tensor:
        gated = norm_mul_dropout(
            attended.to(u.dtype),
            u,
            self.norm.weight,
            self.norm.bias,
            num_groups=1 if self.form.norm == "layer" else self.num_heads,
            eps=self.norm.eps,
            gate=self.form.gate,
            dropout=self.dropout.p if self.training else 0.0,
        )
        return self.output(gated)


@lru_cache(maxsize=1)
def _compiled_front() -> Callable[["STULayer", Tensor], list[Tensor]]:
    """`_front` of any layer: compiled once for a form, not for a layer or a number of tokens."""
    return torch.compile(_front, dynamic=True)


def _front(layer: "STULayer", x: Tensor) -> list[Tensor]:
    """u, v, q and k behind their activation, [T, H * its width]."""
    return layer._split(layer._project(x))


class Projected(NamedTuple):
    """What a layer makes of its input before tokens see each other."""

    u: Tensor  # [T, H * V]
    q: Tensor  # [T, H, D]
    k: Tensor  # [T, H, D]
    v: Tensor  # [T, H, V]


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
