"""`STULayer`: one sequential transduction unit, the layer that HSTU stacks.

Source: Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152. How tokens see each other is handed
in as a function, so the layer is the same with any mask, bias or kernel.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recsys.modules import stu_node
from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.modules.precision import product_dtype
from recsys.modules.recompute import Watch, rebuilt_in_backward
from recsys.ops import GradientBuffer, gated_norm, gather_rows, norm_linear
from recsys.ops.gated_norm import new_seed
from recsys.ops.norm_linear import NormLinear

Attend = Callable[..., Tensor]
"""Attention over the tokens at hand: q, k [T, H, D], v [T, H, V] -> [T, H, V]. On a GPU it also gets
`grad_buffer`, see `recsys.ops.hstu_attention.attend`."""


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
            and dropout). Attention itself never runs again, and gradients are the same, up to rounding for
            "gated" on a GPU. A traced graph ignores it: compilers decide for themselves.
        compiled: whether `torch.compile` makes fewer kernels of what stands in front of attention, also where
            there are ops for it. One graph serves all layers of a form and all numbers of tokens.

    On a GPU, in eager mode, norms, activation and sums are parts of a few ops, and backward writes the
    gradients of u, v, q and k side by side: see `recsys.ops.norm_linear` and `GradientBuffer`.

    Raises:
        ValueError: `compiled` with "normed_x" or "uvqk" in `recompute`.
    """

    fused: bool | None = None
    """Whether it is made of these ops; None: on a GPU. For tests."""

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
        self._shapes: dict[tuple[torch.dtype, bool, float], stu_node.Shape] = {}
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
        if scale is None and (plan := self._plan(x, attend)) is not None:
            return self._as_one_node(x, plan)
        if "uvqk" not in self._recomputed():
            return self._through(self.project(x), attend, scale)
        if self._is_fused(x):
            with rebuilt_in_backward(partial(self._front_again, x.detach()), x.device.type) as watch:
                return self._through(self._front(x, watch), attend, scale)
        joined = self._join(x)
        with rebuilt_in_backward(partial(self._all_projected, x.detach()), x.device.type) as watch:
            return self._through(self._divide(x, joined, watch), attend, scale)

    def project(self, x: Tensor) -> "Projected":
        """The first half of `forward`, for layers that share one attention; keeps u, q, k and v."""
        if self._is_fused(x):
            return self._front(x)
        if self.compiled and x.shape[0] > 1 and not torch.compiler.is_compiling():
            return self._heads(x, *_compiled_front()(self, x))
        return self._divide(x, self._join(x))

    def keys_and_values(self, x: Tensor) -> "Kept":
        """k and v of `project` alone, for tokens that are looked at and do not look themselves."""
        _, v, _, k = self._weights()
        return self._kept(self._some_parts(x, v, k).parts)

    def forward_some(self, x: Tensor, index: Tensor, attend: Attend, scale: Tensor | None = None) -> Tensor:
        """[S, E], the rows `index` of `forward`, where nobody looks at the others.

        u, q and all behind attention are computed for these rows alone, k and v for all.

        Args:
            x: [T, E].
            index: int64 [S], rows of x, none twice.
            attend: of T tokens; the others have a q of zeros, and what it returns for them is not read.
            scale: [S, 1], see `forward`.
        """
        if scale is None and (plan := self._plan(x, attend)) is not None:
            return self._as_one_node(x, plan, index)
        places = torch.arange(index.shape[0], device=index.device)
        inverse = index.new_full((x.shape[0],), -1).scatter_(0, index, places)
        of_u, of_v, of_q, of_k = self._weights()
        looked_at = self._some_parts(x, of_v, of_k)
        own = self._some_parts(gather_rows(looked_at.x, index, inverse), of_u, of_q)
        u, q = map(F.silu, own.parts) if self.form.activation == "uvqk" else own.parts
        if self.form.activation == "u" and not self._is_fused(x):
            u = F.silu(u)
        q = gather_rows(q.unflatten(1, (self.num_heads, -1)), inverse, index)
        k, v = self._kept(looked_at.parts)
        plain = self.form.activation == "u"  # else the gradients of the parts pass an activation
        attended = attend(q, k, v, **_room(looked_at.grad_buffer if plain else None))
        attended = gather_rows(attended, index, inverse)
        return self.finish(own.x, u, attended, scale, own.grad_buffer if plain else None)

    def may_forward_some(self) -> bool:
        """Whether `forward_some` keeps what this layer is to keep for backward: it computes nothing again."""
        return not self.compiled and not {"normed_x", "uvqk"} & set(self._recomputed())

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of u, v, q and k."""
        parameters = (self.uvqk.weight, self.uvqk.bias)
        return list(zip(*(one.split(self.widths) for one in parameters), strict=True))

    def _some_parts(self, x: Tensor, *chosen: tuple[Tensor, Tensor]) -> NormLinear:
        """Some of u, v, q and k before their activation, by their weight and bias."""
        return norm_linear(
            x,
            self.input_norm.weight,
            self.input_norm.bias,
            torch.cat([weight for weight, _ in chosen]),
            torch.cat([bias for _, bias in chosen]),
            [len(bias) for _, bias in chosen],
            eps=self.input_norm.eps,
            dtype=product_dtype(x),
        )

    def _kept(self, parts: Sequence[Tensor]) -> "Kept":
        v, k = map(F.silu, parts) if self.form.activation == "uvqk" else parts
        return Kept(k.unflatten(1, (self.num_heads, -1)), v.unflatten(1, (self.num_heads, -1)))

    def finish(
        self,
        x: Tensor,
        u: Tensor,
        attended: Tensor,
        scale: Tensor | None = None,
        grad_buffer: GradientBuffer | None = None,
    ) -> Tensor:
        """The second half of `forward`: [T, E] from `project`'s result and attention's [T, H, V]."""
        attended = attended.flatten(1)
        if "gated" in self._recomputed():
            random = self.training and self.dropout.p > 0
            given = (u, attended, grad_buffer)
            branch = checkpoint(
                self._gate_and_project, *given, use_reentrant=False, preserve_rng_state=random
            )
        else:
            branch = self._gate_and_project(u, attended, grad_buffer)
        if scale is not None:
            branch = (scale * branch).to(x.dtype)
        return x + branch

    def _through(self, given: "Projected", attend: Attend, scale: Tensor | None) -> Tensor:
        """Attention, and what comes behind it."""
        attended = attend(given.q, given.k, given.v, **_room(given.grad_buffer))
        return self.finish(given.x, given.u, attended, scale, given.grad_buffer)

    def _plan(self, x: Tensor, attend: Attend) -> stu_node.Plan | None:
        """How to compute it as one node, where that can be done and nothing is watched in between."""
        recorded = torch.is_grad_enabled() and self._is_fused(x)
        if not recorded or self.recompute & {"uvqk", "gated"} or x.numel() > stu_node.MOST_ENTRIES:
            return None
        return stu_node.plan_of(x, self._shape(x), attend)

    def _shape(self, x: Tensor) -> stu_node.Shape:
        dropout = self.dropout.p if self.training else 0.0
        key = (product_dtype(x), "normed_x" not in self.recompute, dropout)
        if key not in self._shapes:
            value_width, _, key_width, _ = self.widths
            self._shapes[key] = stu_node.Shape(
                num_heads=self.num_heads,
                qk_dim=key_width // self.num_heads,
                v_dim=value_width // self.num_heads,
                eps=self.input_norm.eps,
                num_groups=1 if self.form.norm == "layer" else self.num_heads,
                gate_eps=self.norm.eps,
                concat=self.form.gate == "concat",
                dtype=key[0],
                keep_normed=key[1],
                dropout=dropout,
                all_silu=self.form.activation == "uvqk",
            )
        return self._shapes[key]

    def _as_one_node(self, x: Tensor, plan: stu_node.Plan, index: Tensor | None = None) -> Tensor:
        seed = new_seed(x.device) if plan.shape.dropout else None
        parts = (self.input_norm, self.uvqk, self.norm, self.output)
        weights = stu_node.Weights(*(one for part in parts for one in (part.weight, part.bias)), seed)
        if index is None:
            return stu_node.StuNode.apply(x, *weights, plan)
        return stu_node.SomeRowsNode.apply(x, *weights, plan, index)

    def _is_fused(self, x: Tensor) -> bool:
        if self.fused is None:
            return x.is_cuda and not self.compiled and not torch.compiler.is_compiling()
        return self.fused

    def _front(self, x: Tensor, watch: Watch | None = None) -> "Projected":
        """`project` by an op; u before its activation in the form "u"."""
        all_silu = self.form.activation == "uvqk"
        in_steps = all_silu and watch is not None
        parts, x, grad_buffer = norm_linear(
            x,
            self.input_norm.weight,
            self.input_norm.bias,
            self.uvqk.weight,
            self.uvqk.bias,
            [sum(self.widths)] if in_steps else self.widths,
            eps=self.input_norm.eps,
            dtype=product_dtype(x),
            keep_normed="normed_x" not in self._recomputed(),
            silu=all_silu and not in_steps,
        )
        made = [parts[0]]
        if watch is not None:
            watch(made)
        if in_steps:
            parts, grad_buffer = F.silu(parts[0]).split(self.widths, dim=1), None
            made.append(parts[0])
            watch(made)
        u, v, q, k = parts
        return self._heads(x, u, v, q, k, grad_buffer)

    def _front_again(self, x: Tensor) -> list[Tensor]:
        """All that `_front` watches: what shares memory with the parts, too."""
        found: list[Tensor] = []
        self._front(x, lambda made: found.extend(made[len(found) :]))
        return found

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

    def _divide(self, x: Tensor, joined: Tensor, watch: Watch | None = None) -> "Projected":
        if watch is not None:
            watch([joined])
        u, v, q, k = self._split(joined)
        if watch is not None:
            watch([joined, u, v, q, k])
        return self._heads(x, u, v, q, k)

    def _heads(
        self, x: Tensor, u: Tensor, v: Tensor, q: Tensor, k: Tensor, grad_buffer: GradientBuffer | None = None
    ) -> "Projected":
        return Projected(u, *(part.unflatten(1, (self.num_heads, -1)) for part in (q, k, v)), x, grad_buffer)

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

    def _gate_and_project(self, u: Tensor, attended: Tensor, grad_buffer: GradientBuffer | None) -> Tensor:
        return self.output(self._gate(u, attended, grad_buffer))

    def _gate(self, u: Tensor, attended: Tensor, grad_buffer: GradientBuffer | None) -> Tensor:
        return gated_norm(
            attended.to(u.dtype),
            u,
            self.norm.weight,
            self.norm.bias,
            num_groups=1 if self.form.norm == "layer" else self.num_heads,
            eps=self.norm.eps,
            gate=self.form.gate,
            dropout=self.dropout.p if self.training else 0.0,
            silu=self.form.activation == "u" and self._is_fused(u),
            grad_buffer=grad_buffer,
        )


def _room(grad_buffer: GradientBuffer | None) -> dict[str, GradientBuffer]:
    return {} if grad_buffer is None else {"grad_buffer": grad_buffer}


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
    x: Tensor  # [T, E], the input, for `STULayer.finish`
    grad_buffer: GradientBuffer | None  # for the gradients of the others, where ops can use one


class Kept(NamedTuple):
    """What a layer looks at of tokens that it has seen before."""

    k: Tensor  # [T, H, D]
    v: Tensor  # [T, H, V]
