"""An STU layer as one node of the graph, where kernels of ours compute it.

The ops of the layer stay what they are, and so does what they compute: their autograd functions run behind
one another within a single one. PyTorch's work around a node is then done once a layer, not for four
functions and six views, which is a third of what a layer's forward pass costs the host.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.modules.precision import product_dtype
from recsys.ops import AttentionMask, GradientBuffer
from recsys.ops.attention_args import AttentionFacts, check_number
from recsys.ops.gated_norm import OP as GATE
from recsys.ops.gated_norm import GateFacts, new_seed
from recsys.ops.hstu_attention import OP as ATTENTION
from recsys.ops.hstu_attention import Problem
from recsys.ops.hstu_attention import attend as hstu_attend
from recsys.ops.jagged import OP as GATHER
from recsys.ops.jagged import GatherFacts
from recsys.ops.norm_linear import OP as NORM_LINEAR
from recsys.ops.norm_linear import NormLinearFacts
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.dispatch import Op
from recsys.ops.runtime.saved_function import Parts

LINEAR = "recsys.ops.runtime.column_sums"
"""The module of `LinearAdd`; it needs Triton."""

triton_support.preload(LINEAR)

MOST_ENTRIES = 10**8
"""Of a layer's input. With more of them the GPU has more to do than the host, and functions of their own let
go of what they have kept one after the other, a node only at its end (experiments/2026-11-22-gpu-stu)."""


class Shape(NamedTuple):
    """What a layer computes, beside its tensors."""

    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype  # of the products
    eps: float  # of the first norm
    keep_normed: bool
    num_groups: int  # of the second norm
    gate_eps: float
    concat: bool
    dropout: float
    all_silu: bool  # u, v, q and k go through SiLU, not u alone

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Of u, v, q and k."""
        values, keys = self.num_heads * self.v_dim, self.num_heads * self.qk_dim
        return values, values, keys, keys


def shape_of(layer: Any, x: Tensor) -> Shape:
    """Describes what an `STULayer` computes for x; a layer keeps the result."""
    dropout = layer.dropout.p if layer.training else 0.0
    key = (product_dtype(x), "normed_x" not in layer.recompute, dropout)
    if key not in layer.node_shapes:
        value_width, _, key_width, _ = layer.widths
        layer.node_shapes[key] = Shape(
            num_heads=layer.num_heads,
            qk_dim=key_width // layer.num_heads,
            v_dim=value_width // layer.num_heads,
            eps=layer.input_norm.eps,
            num_groups=1 if layer.config.norm == "layer" else layer.num_heads,
            gate_eps=layer.norm.eps,
            concat=layer.config.gate == "concat",
            dtype=key[0],
            keep_normed=key[1],
            dropout=dropout,
            all_silu=layer.config.activation == "uvqk",
        )
    return layer.node_shapes[key]


class Plan(NamedTuple):
    """How a layer is computed: its kernels are in these modules."""

    shape: Shape
    problem: Problem
    norm_linear: ModuleType
    attend: ModuleType
    gate: ModuleType
    gather: ModuleType


def plan_of(x: Tensor, shape: Shape, attend: Callable[..., Tensor]) -> Plan | None:
    """How to compute a layer of x as one node; None where not all of it has kernels with a function of their
    own, and where `attend` is not the `attend` of `hstu_attention` with `problem` and `backend` by name.

    Raises:
        TypeError, ValueError: numbers of the attention.
    """
    if not isinstance(attend, partial) or attend.func is not hstu_attend or attend.args:
        return None
    problem, backend = attend.keywords["problem"], attend.keywords.get("backend", "auto")
    if problem.layout.total_len != x.shape[0] or problem.bias is not None:
        return None
    facts = _facts_of(x.device.type, x.dtype, x.shape[1], shape, problem.mask, problem.deterministic)
    backends = ("auto", backend, "auto", "auto")
    modules = [_kernels(op, known, name) for (op, known), name in zip(facts, backends, strict=True)]
    if None in modules:
        return None
    check_number("scale_len", problem.scale_len, positive=True)
    check_number("alpha", problem.alpha)
    return Plan(shape, problem, *modules)


@lru_cache(maxsize=1024)
def _facts_of(
    device: str, dtype: torch.dtype, width: int, shape: Shape, mask: AttentionMask, deterministic: bool
) -> tuple[tuple[Op, Any], ...]:
    """What the ops of a layer ask their backends, in the order of a plan's modules."""
    values, _, _, _ = shape.widths
    heads = (shape.num_heads, shape.qk_dim, shape.v_dim)
    return (
        (NORM_LINEAR, NormLinearFacts(device, dtype, shape.dtype, width)),
        (ATTENTION, AttentionFacts(device, shape.dtype, *heads, mask, False, True, deterministic)),
        (GATE, GateFacts(device, shape.dtype, values // shape.num_groups)),
        (GATHER, GatherFacts(device, shape.dtype, 1)),
    )


def _kernels(op: Op, facts: Any, backend: str) -> ModuleType | None:
    """The module of the autograd function of the backend that would run, if it has one."""
    module = op.select(facts, backend)
    if module.__name__.endswith(".reference"):
        return None
    separator = "." if hasattr(module, "__path__") else "_"  # a backend is a package or a module
    return triton_support.load(f"{module.__name__}{separator}ops")


class Weights(NamedTuple):
    """The parameters of a layer, and the seed of its dropout, if it has one."""

    norm_weight: Tensor
    norm_bias: Tensor
    weight: Tensor
    bias: Tensor
    gate_weight: Tensor
    gate_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor | None
    seed: Tensor | None

    @property
    def norm(self) -> tuple[Tensor, Tensor]:
        return self.norm_weight, self.norm_bias

    @property
    def product(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias

    @property
    def gate(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.gate_weight, self.gate_bias, self.seed

    @property
    def output(self) -> tuple[Tensor, Tensor | None]:
        return self.output_weight, self.output_bias


def run(layer: Any, x: Tensor, plan: Plan, index: Tensor | None = None) -> Tensor:
    """Runs an `STULayer` as one node: `forward`, or `forward_rows` with an `index`."""
    seed = new_seed(x.device) if plan.shape.dropout else None
    parts = (layer.input_norm, layer.uvqk, layer.norm, layer.output)
    weights = Weights(*(tensor for part in parts for tensor in (part.weight, part.bias)), seed)
    if index is None:
        return StuNode.apply(x, *weights, plan)
    return SomeRowsNode.apply(x, *weights, plan, index)


class StuNode(torch.autograd.Function):
    """`apply(x, *weights, plan)`: see `STULayer`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        weights, plan = Weights(*given[:-1]), given[-1]
        shape, needed, parts = plan.shape, ctx.needs_input_grad, Parts()
        grad_buffer = GradientBuffer(shape.widths)
        u, *vqk = _project(parts, plan, x, weights.norm, weights.product, grad_buffer, needed)
        v, q, k = (part.unflatten(1, (shape.num_heads, -1)) for part in vqk)
        attended = _attend(parts, plan, q, k, v, grad_buffer)
        out = _finish(parts, plan, x, attended, u, grad_buffer, weights, needed)
        parts.save(ctx)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        front, attention, gate, end = ctx.parts.restored(ctx.saved_tensors)
        grad_x, grad_gated, *of_output = end.gradients(grad_out)
        grad_attended, grad_u, *of_gate = gate.gradients(grad_gated)[:4]
        grad_attended = grad_attended.view(attention.saved_tensors[2].shape)
        grad_q, grad_k, grad_v = attention.gradients(grad_attended)[:3]
        parts = (one.flatten(1) for one in (grad_v, grad_q, grad_k))
        of_front = front.gradients(grad_x, grad_u, *parts)[:5]
        return (*of_front, *of_gate, *of_output, None, None)


class SomeRowsNode(torch.autograd.Function):
    """`apply(x, *weights, plan, index)`: see `STULayer.forward_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        weights, plan, index = Weights(*given[:-2]), *given[-2:]
        shape, needed, parts, gather = plan.shape, ctx.needs_input_grad, Parts(), plan.gather.launch_gather
        values, _, keys, _ = shape.widths
        inverse = plan.gather.launch_invert(index, [index.shape[0]], x.shape[0])[0]
        of_u, of_v, of_q, of_k = zip(*(one.split(shape.widths) for one in weights.product), strict=True)
        grad_buffers = (GradientBuffer((values, keys)), GradientBuffer((values, keys)))
        of_others, of_own = _stacked(of_v, of_k), _stacked(of_u, of_q)
        v, k = _project(parts, plan, x, weights.norm, of_others, grad_buffers[0], needed)
        own = gather([x], index)
        u, q = _project(parts, plan, own, weights.norm, of_own, grad_buffers[1], needed)
        k, v, q = (part.unflatten(1, (shape.num_heads, -1)) for part in (k, v, q))
        attended = gather([_attend(parts, plan, gather([q], inverse), k, v, grad_buffers[0])], index)
        out = _finish(parts, plan, own, attended, u, grad_buffers[1], weights, needed)
        parts.save(ctx, index, inverse)
        ctx.plan = plan
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        others, own, attention, gate, end = ctx.parts.restored(ctx.saved_tensors)
        (index, inverse), shape = ctx.saved_tensors[-2:], ctx.plan.shape
        gather, values = ctx.plan.gather.launch_gather, shape.widths[0]
        grad_own, grad_gated, *of_output = end.gradients(grad_out)
        grad_attended, grad_u, *of_gate = gate.gradients(grad_gated)[:4]
        grad_attended = grad_attended.view(-1, shape.num_heads, shape.v_dim)
        grad_q, grad_k, grad_v = attention.gradients(gather([grad_attended], inverse))[:3]
        grad_q = gather([grad_q], index).flatten(1)
        grad_own, *of_norm, weight, bias = own.gradients(grad_own, grad_u, grad_q)[:5]
        grad_x = gather([grad_own], inverse)
        grad_x, *also, other_weight, other_bias = others.gradients(
            grad_x, grad_v.flatten(1), grad_k.flatten(1)
        )[:5]
        of_norm = [one + other for one, other in zip(of_norm, also, strict=True)]
        of_product = [
            None if one is None else torch.cat([one[:values], other[:values], one[values:], other[values:]])
            for one, other in ((weight, other_weight), (bias, other_bias))
        ]
        return (grad_x, *of_norm, *of_product, *of_gate, *of_output, None, None, None)


def _stacked(*chosen: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Weight and bias of some of u, v, q and k."""
    return [torch.cat(parts) for parts in zip(*chosen, strict=True)]


def _project(
    parts: Parts,
    plan: Plan,
    x: Tensor,
    norm: Sequence[Tensor],
    of_product: Sequence[Tensor],
    grad_buffer: GradientBuffer,
    needed: Sequence[bool],
) -> Sequence[Tensor]:
    """Parts of the projection of norm(x)."""
    shape = plan.shape
    arguments = (
        x,
        *norm,
        *of_product,
        grad_buffer,
        shape.eps,
        shape.dtype,
        shape.keep_normed,
        shape.all_silu,
    )
    return parts.run(plan.norm_linear.NormLinear, arguments, needed[:5])[1:]


def _attend(parts: Parts, plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad_buffer: GradientBuffer) -> Tensor:
    problem = plan.problem.with_grad_buffer(grad_buffer)
    layout, mask, alpha, scale_len = problem.layout, problem.mask, problem.alpha, problem.scale_len
    ATTENTION.show(q=q, k=k, layout=layout, mask=mask, alpha=alpha, scale_len=scale_len, bias=None)
    arguments = (q, k, v, None, None, problem)
    return parts.run(plan.attend.HstuAttention, arguments, (True, True, True, False, False))


def _finish(
    parts: Parts,
    plan: Plan,
    x: Tensor,
    attended: Tensor,
    u: Tensor,
    grad_buffer: GradientBuffer,
    weights: Weights,
    needed: Sequence[bool],
) -> Tensor:
    """Gate, output projection and residual sum."""
    shape = plan.shape
    options = (shape.num_groups, shape.gate_eps, shape.concat, shape.dropout, not shape.all_silu)
    arguments = (attended.flatten(1), u, *weights.gate, grad_buffer, *options)
    gated = parts.run(plan.gate.GatedNorm, arguments)
    linear_add = triton_support.load(LINEAR).LinearAdd
    return parts.run(linear_add, (x, gated, *weights.output), (True, True, *needed[7:9]))
