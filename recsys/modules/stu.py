"""`STULayer`: one sequential transduction unit, the layer that HSTU stacks.

The layer is x + project(dropout(gate(u, norm(attention(q, k, v))))), with u, v, q, k from one projection of
norm(x). The caller passes attention as a function, so the layer is the same with any mask, bias or kernel.
Source: Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from recsys.modules import stu_node
from recsys.modules.norm import HeadNorm, LayerNorm
from recsys.modules.stu_paths import Attend, EagerPath, FusedPath, KeysValues, Path, Projected

__all__ = ["KeysValues", "Projected", "STUConfig", "STULayer"]


@dataclass(frozen=True)
class STUConfig:
    """The choice among the published variants of the layer.

    Attributes:
        activation: "u" applies SiLU to u only (production form); "uvqk" applies it to all four (research
            form).
        norm: norm of attention's output: "layer" normalizes over H * V, "group" over each head separately.
        gate: input of the output projection: "ugn" is u * norm(a), with an output bias (research form);
            "concat" is [u, a, u * norm(a)] (production form).
    """

    activation: Literal["u", "uvqk"] = "u"
    norm: Literal["layer", "group"] = "layer"
    gate: Literal["ugn", "concat"] = "concat"


class STULayer(nn.Module):
    """Holds the parameters of a layer and chooses its execution path.

    `stu_node` runs a layer as one autograd node if kernels exist for all of its ops. Otherwise `FusedPath`
    runs it by fused ops on a GPU, or `EagerPath` by PyTorch's operations on any device. Their results are
    equal up to rounding.

    Args:
        embedding_dim: E.
        num_heads: H.
        qk_dim: D, width of a query and key in each head.
        v_dim: V, width of a value in each head.
        config: activation, norm and gate.
        dropout: probability of dropout before the output projection, in training.
        recompute: tensors that backward computes again from x and attention's output a instead of keeping
            them: "normed_x" (norm(x)), "uvqk" (the projection, before and after its activation), "gated"
            (norm(a), gate and dropout). Attention itself never runs again. Gradients are the same, except for
            rounding with "gated" on a GPU. Traced graphs ignore it, since compilers decide for themselves.
        compiled: whether `torch.compile` fuses the operations before attention, even if ops could compute
            them. One graph serves all layers of equal config and all numbers of tokens.

    Attributes:
        widths: widths of u, v, q and k in the joined projection.

    Raises:
        ValueError: `compiled` is combined with "normed_x" or "uvqk" in `recompute`.
    """

    fused: bool | None = None
    """Forces or forbids the fused ops, for tests; None uses them on a GPU."""

    def __init__(
        self,
        embedding_dim: int,
        *,
        num_heads: int,
        qk_dim: int,
        v_dim: int,
        config: STUConfig = STUConfig(),
        dropout: float = 0.0,
        recompute: Collection[Literal["normed_x", "uvqk", "gated"]] = (),
        compiled: bool = False,
    ):
        super().__init__()
        if compiled and {"normed_x", "uvqk"} & set(recompute):
            raise ValueError(
                "compile: compiled layers cannot recompute NORMED_X or UVQK: set compile to false, or leave "
                "them out of recompute"
            )
        self.compiled = compiled
        self.num_heads = num_heads
        self.config = config
        self.recompute = frozenset(recompute)
        self.dropout = nn.Dropout(dropout)
        value_width, key_width = num_heads * v_dim, num_heads * qk_dim
        self.widths = [value_width, value_width, key_width, key_width]
        self.node_shapes: dict[tuple[torch.dtype, bool, float], stu_node.Shape] = {}
        self.input_norm = LayerNorm(embedding_dim)
        self.uvqk = nn.Linear(embedding_dim, sum(self.widths))
        self.norm = LayerNorm(value_width) if config.norm == "layer" else HeadNorm(num_heads, v_dim)
        gated_width = 3 * value_width if config.gate == "concat" else value_width
        self.output = nn.Linear(gated_width, embedding_dim, bias=config.gate == "ugn")
        for linear in (self.uvqk, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, attend: Attend, scale: Tensor | None = None) -> Tensor:
        """Maps [T, E] to [T, E]; `scale` [T, 1] multiplies the branch that is added to x."""
        if scale is None and (plan := self._node_plan(x, attend)) is not None:
            return stu_node.run(self, x, plan)
        return self._path(x).forward(x, attend, scale)

    def forward_rows(self, x: Tensor, index: Tensor, attend: Attend, scale: Tensor | None = None) -> Tensor:
        """Computes only the rows `index` of `forward`, [S, E].

        u, q and everything after attention are computed for these rows only, k and v for all rows.

        Args:
            x: [T, E].
            index: int64 [S], rows of x, all different.
            attend: attention over T tokens; the other rows have a q of zeros, and their results are not read.
            scale: [S, 1], see `forward`.
        """
        if scale is None and (plan := self._node_plan(x, attend)) is not None:
            return stu_node.run(self, x, plan, index)
        return self._path(x).forward_rows(x, index, attend, scale)

    def can_skip_rows(self) -> bool:
        """Whether `forward_rows` can run: not if the layer is compiled or recomputes norm or projection."""
        return not self.compiled and not {"normed_x", "uvqk"} & set(self.recomputed())

    def project(self, x: Tensor) -> Projected:
        """Runs the first half of `forward`, for layers that share one attention; nothing is recomputed."""
        return self._path(x).project(x)

    def keys_and_values(self, x: Tensor) -> KeysValues:
        """Computes only k and v of `project`, for tokens that others attend to but that do not attend."""
        return self._path(x).keys_and_values(x)

    def finish(self, x: Tensor, u: Tensor, attended: Tensor, scale: Tensor | None = None) -> Tensor:
        """Runs the second half of `forward`: returns [T, E] from u of `project` and attention's [T, H, V]."""
        return self._path(x).finish(x, u, attended, scale)

    def recomputed(self) -> Collection[str]:
        """Returns `recompute` in eager training, else an empty collection."""
        eager_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return self.recompute if eager_training else ()

    def _path(self, x: Tensor) -> Path:
        return FusedPath(self) if self._is_fused(x) else EagerPath(self)

    def _is_fused(self, x: Tensor) -> bool:
        if self.fused is None:
            return x.is_cuda and not self.compiled and not torch.compiler.is_compiling()
        return self.fused

    def _node_plan(self, x: Tensor, attend: Attend) -> stu_node.Plan | None:
        """Returns a plan for one node; None if backward recomputes tensors inside it or it is not faster."""
        recorded = torch.is_grad_enabled() and self._is_fused(x)
        if not recorded or self.recompute & {"uvqk", "gated"} or x.numel() > stu_node.MOST_ENTRIES:
            return None
        return stu_node.plan_of(x, stu_node.shape_of(self, x), attend)
