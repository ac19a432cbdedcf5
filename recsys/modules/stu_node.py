"""Runs an STU layer as one autograd node, if this package has kernels for all of its ops.

The node runs the ops' own autograd functions one after another, so its results are the same. PyTorch's
overhead of a node then arises once per layer instead of for four functions and six views, where it makes up a
third of the host's time for a layer's forward pass.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recsys.modules.precision import product_dtype
from recsys.ops import AttentionMask, GradientBuffer
from recsys.ops.attention_args import AttentionFacts
from recsys.ops.gated_norm import OP as GATE
from recsys.ops.gated_norm import GateFacts, GateOptions, new_seed
from recsys.ops.hstu_attention import OP as ATTENTION
from recsys.ops.hstu_attention import Problem
from recsys.ops.hstu_attention import attend as hstu_attend
from recsys.ops.jagged import OP as GATHER
from recsys.ops.jagged import GatherFacts
from recsys.ops.norm_linear import OP as NORM_LINEAR
from recsys.ops.norm_linear import NormLinearFacts, NormLinearOptions
from recsys.ops.runtime import triton_support
from recsys.ops.runtime.arguments import check_number
from recsys.ops.runtime.autograd import SavedCalls
from recsys.ops.runtime.dispatch import Op

LINEAR = "recsys.ops.runtime.column_sums"
"""The module that defines `LinearAdd`; it needs Triton."""

triton_support.preload(LINEAR)

MOST_ENTRIES = 10**8
"""Use one node for up to this many elements of a layer's input.

Above it the GPU, not Python, is the bottleneck, and separate nodes free their saved tensors earlier
(experiments/2026-11-22-gpu-stu).
"""


class Shape(NamedTuple):
    """The settings that, together with its tensors, determine the result of a layer.

    Attributes:
        num_heads, qk_dim, v_dim: H, D and V.
        dtype: dtype of the matrix products.
        eps: added to the variance of the first norm.
        keep_normed: whether norm(x) is kept for backward rather than computed again.
        num_groups: groups of the second norm.
        gate_eps: added to the variance of the second norm.
        concat: whether the output projection reads [u, a, u * norm(a)] rather than u * norm(a).
        dropout: probability of dropout in training, 0 in evaluation.
        all_silu: whether u, v, q and k all pass through SiLU, rather than u alone.
    """

    num_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype
    eps: float
    keep_normed: bool
    num_groups: int
    gate_eps: float
    concat: bool
    dropout: float
    all_silu: bool

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The widths of u, v, q and k."""
        values, keys = self.num_heads * self.v_dim, self.num_heads * self.qk_dim
        return values, values, keys, keys


def shape_of(layer: Any, x: Tensor) -> Shape:
    """Describes what an `STULayer` computes for x; the layer caches the result."""
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
    """The computation of a layer: its settings, its attention, and the modules with its ops' kernels."""

    shape: Shape
    problem: Problem
    norm_linear: ModuleType
    attend: ModuleType
    gate: ModuleType
    gather: ModuleType


def plan_of(x: Tensor, shape: Shape, attend: Callable[..., Tensor]) -> Plan | None:
    """Plans one node for x, or returns None if that is not possible.

    It is not possible if some op has no kernels with an autograd function, or if `attend` is not the `attend`
    of `hstu_attention` with `problem` and `backend` passed by name.

    Raises:
        TypeError, ValueError: the settings of the attention are invalid.
    """
    if not isinstance(attend, partial) or attend.func is not hstu_attend or attend.args:
        return None
    problem, backend = attend.keywords["problem"], attend.keywords.get("backend", "auto")
    if problem.layout.total_len != x.shape[0] or problem.bias is not None:
        return None
    facts = _facts_of(x.device.type, x.dtype, x.shape[1], shape, problem.mask, problem.deterministic)
    backends = ("auto", backend, "auto", "auto")
    modules = [_kernels(op, op_facts, name) for (op, op_facts), name in zip(facts, backends, strict=True)]
    if None in modules:
        return None
    check_number("scale_len", problem.scale_len, positive=True)
    check_number("alpha", problem.alpha)
    return Plan(shape, problem, *modules)


@lru_cache(maxsize=1024)
def _facts_of(
    device: str, dtype: torch.dtype, width: int, shape: Shape, mask: AttentionMask, deterministic: bool
) -> tuple[tuple[Op, Any], ...]:
    """Returns the ops of a layer, in a plan's order, with the facts by which each chooses its backend."""
    values, _, _, _ = shape.widths
    heads = (shape.num_heads, shape.qk_dim, shape.v_dim)
    return (
        (NORM_LINEAR, NormLinearFacts(device, dtype, shape.dtype, width)),
        (ATTENTION, AttentionFacts(device, shape.dtype, *heads, mask, False, True, deterministic)),
        (GATE, GateFacts(device, shape.dtype, values // shape.num_groups)),
        (GATHER, GatherFacts(device, shape.dtype, 1)),
    )


def _kernels(op: Op, facts: Any, backend: str) -> ModuleType | None:
    """Returns the module with the autograd function of the backend that would run; None if it has none."""
    module = op.select(facts, backend)
    return None if module.__name__.endswith(".reference") else module


class Weights(NamedTuple):
    """The parameters of a layer, and the seed of its dropout, if there is dropout."""

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
    """Runs an `STULayer` as one node: `forward`, or `forward_rows` if there is an `index`."""
    seed = new_seed(x.device) if plan.shape.dropout else None
    parts = (layer.input_norm, layer.uvqk, layer.norm, layer.output)
    weights = Weights(*(tensor for part in parts for tensor in (part.weight, part.bias)), seed)
    if index is None:
        return StuNode.apply(x, *weights, plan)
    return RowsNode.apply(x, *weights, plan, index)


class StuNode(torch.autograd.Function):
    """The node of `STULayer.forward`; call `apply(x, *weights, plan)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Any) -> Tensor:
        weights, plan = Weights(*inputs[:-1]), inputs[-1]
        shape, needed, calls = plan.shape, ctx.needs_input_grad, SavedCalls()
        grad_buffer = GradientBuffer(shape.widths)
        u, *vqk = _project(calls, plan, x, weights.norm, weights.product, grad_buffer, needed)
        v, q, k = (part.unflatten(1, (shape.num_heads, -1)) for part in vqk)
        attended = _attend(calls, plan, q, k, v, grad_buffer)
        out = _finish(calls, plan, x, attended, u, grad_buffer, weights, needed)
        calls.save(ctx)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        front, attention, gate, end = ctx.calls.restored(ctx.saved_tensors)
        grad_x, grad_gated, *output_grads = end.gradients(grad_out)
        grad_attended, grad_u, *gate_grads = gate.gradients(grad_gated)[:4]
        grad_attended = grad_attended.view(attention.saved_tensors[2].shape)
        grad_q, grad_k, grad_v = attention.gradients(grad_attended)[:3]
        joined_grads = (grad.flatten(1) for grad in (grad_v, grad_q, grad_k))
        front_grads = front.gradients(grad_x, grad_u, *joined_grads)[:5]
        return (*front_grads, *gate_grads, *output_grads, None, None)


class RowsNode(torch.autograd.Function):
    """The node of `STULayer.forward_rows`; call `apply(x, *weights, plan, index)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Any) -> Tensor:
        weights, plan, index = Weights(*inputs[:-2]), *inputs[-2:]
        shape, needed, calls, gather = (
            plan.shape,
            ctx.needs_input_grad,
            SavedCalls(),
            plan.gather.launch_gather,
        )
        values, _, keys, _ = shape.widths
        inverse = plan.gather.launch_invert(index, [index.shape[0]], x.shape[0])[0]
        pairs = zip(*(joined.split(shape.widths) for joined in weights.product), strict=True)
        u_weights, v_weights, q_weights, k_weights = pairs
        kv_buffer, uq_buffer = GradientBuffer((values, keys)), GradientBuffer((values, keys))
        kv_weights, uq_weights = _stacked(v_weights, k_weights), _stacked(u_weights, q_weights)
        v, k = _project(calls, plan, x, weights.norm, kv_weights, kv_buffer, needed)
        rows = gather([x], index)
        u, q = _project(calls, plan, rows, weights.norm, uq_weights, uq_buffer, needed)
        k, v, q = (part.unflatten(1, (shape.num_heads, -1)) for part in (k, v, q))
        attended = gather([_attend(calls, plan, gather([q], inverse), k, v, kv_buffer)], index)
        out = _finish(calls, plan, rows, attended, u, uq_buffer, weights, needed)
        calls.save(ctx, index, inverse)
        ctx.plan = plan
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        kv, uq, attention, gate, end = ctx.calls.restored(ctx.saved_tensors)
        (index, inverse), shape = ctx.saved_tensors[-2:], ctx.plan.shape
        gather, values = ctx.plan.gather.launch_gather, shape.widths[0]
        grad_rows, grad_gated, *output_grads = end.gradients(grad_out)
        grad_attended, grad_u, *gate_grads = gate.gradients(grad_gated)[:4]
        grad_attended = grad_attended.view(-1, shape.num_heads, shape.v_dim)
        grad_q, grad_k, grad_v = attention.gradients(gather([grad_attended], inverse))[:3]
        grad_q = gather([grad_q], index).flatten(1)
        grad_rows, *uq_norm_grads, uq_weight, uq_bias = uq.gradients(grad_rows, grad_u, grad_q)[:5]
        grad_x = gather([grad_rows], inverse)
        grad_x, *kv_norm_grads, kv_weight, kv_bias = kv.gradients(
            grad_x, grad_v.flatten(1), grad_k.flatten(1)
        )[:5]
        norm_grads = [a + b for a, b in zip(uq_norm_grads, kv_norm_grads, strict=True)]
        product_grads = [
            None if a is None else torch.cat([a[:values], b[:values], a[values:], b[values:]])
            for a, b in ((uq_weight, kv_weight), (uq_bias, kv_bias))
        ]
        return (grad_x, *norm_grads, *product_grads, *gate_grads, *output_grads, None, None, None)


def _stacked(*chosen: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Concatenates the weights and the biases of some of u, v, q and k."""
    return [torch.cat(parts) for parts in zip(*chosen, strict=True)]


def _project(
    calls: SavedCalls,
    plan: Plan,
    x: Tensor,
    norm: Sequence[Tensor],
    product: Sequence[Tensor],
    grad_buffer: GradientBuffer,
    needed: Sequence[bool],
) -> Sequence[Tensor]:
    """Runs the projection of norm(x) and returns its parts."""
    shape = plan.shape
    options = NormLinearOptions(shape.eps, shape.dtype, shape.keep_normed, shape.all_silu)
    arguments = (x, *norm, *product, grad_buffer, options)
    return calls.run(plan.norm_linear.NormLinear, arguments, needed[:5])[1:]


def _attend(
    calls: SavedCalls, plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad_buffer: GradientBuffer
) -> Tensor:
    problem = plan.problem.with_grad_buffer(grad_buffer)
    layout, mask, alpha, scale_len = problem.layout, problem.mask, problem.alpha, problem.scale_len
    ATTENTION.show(q=q, k=k, layout=layout, mask=mask, alpha=alpha, scale_len=scale_len, bias=None)
    arguments = (q, k, v, None, None, problem)
    return calls.run(plan.attend.HstuAttention, arguments, (True, True, True, False, False))


def _finish(
    calls: SavedCalls,
    plan: Plan,
    x: Tensor,
    attended: Tensor,
    u: Tensor,
    grad_buffer: GradientBuffer,
    weights: Weights,
    needed: Sequence[bool],
) -> Tensor:
    """Runs the gate, the output projection and the residual sum."""
    shape = plan.shape
    options = GateOptions(shape.num_groups, shape.gate_eps, shape.concat, shape.dropout, not shape.all_silu)
    arguments = (attended.flatten(1), u, *weights.gate, grad_buffer, options)
    gated = calls.run(plan.gate.GatedNorm, arguments)
    linear_add = triton_support.load(LINEAR).LinearAdd
    return calls.run(linear_add, (x, gated, *weights.output), (True, True, *needed[7:9]))
