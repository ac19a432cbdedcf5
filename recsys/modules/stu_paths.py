"""Execution paths of an `STULayer`: `EagerPath` uses PyTorch's operations, `FusedPath` fused ops.

A path holds no state: it is created for a call and reads the parameters of its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from recsys.modules import stu_node
from recsys.modules.precision import product_dtype
from recsys.modules.recompute import Watch, rebuilt_in_backward
from recsys.ops import GradientBuffer, gated_norm, gather_rows, norm_linear
from recsys.ops.norm_linear import NormLinear
from recsys.ops.runtime import triton_support

Attend = Callable[..., Tensor]
"""Attention over the tokens of a batch: q, k [T, H, D], v [T, H, V] -> [T, H, V].

`FusedPath` also passes `grad_buffer`, see `recsys.ops.hstu_attention.attend`.
"""


class Projected(NamedTuple):
    """The inputs of attention and gate, which a layer projects from its input.

    Attributes:
        u: [T, H * V].
        q, k: [T, H, D].
        v: [T, H, V].
        x: [T, E], the layer's input, for the residual sum.
        grad_buffer: memory for the gradients of u, v, q and k side by side; None if ops do not use it.
    """

    u: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    grad_buffer: GradientBuffer | None


class KeysValues(NamedTuple):
    """Keys and values of tokens that other tokens attend to.

    Attributes:
        k: [T, H, D].
        v: [T, H, V].
    """

    k: Tensor
    v: Tensor


class Path:
    """Base class of execution paths, with the steps that both share.

    Args:
        layer: an `STULayer`.

    Attributes:
        silu_in_gate: with activation "u", whether the gate rather than the projection applies SiLU to u.
    """

    silu_in_gate: bool

    def __init__(self, layer: Any):
        self.layer = layer

    def forward(self, x: Tensor, attend: Attend, scale: Tensor | None) -> Tensor:
        """Computes `STULayer.forward`."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Projected:
        """Computes `STULayer.project`."""
        raise NotImplementedError

    def forward_rows(self, x: Tensor, index: Tensor, attend: Attend, scale: Tensor | None) -> Tensor:
        """Computes `STULayer.forward_rows`."""
        layer = self.layer
        u_only = layer.config.activation == "u"
        places = torch.arange(index.shape[0], device=index.device)
        inverse = index.new_full((x.shape[0],), -1).scatter_(0, index, places)
        u_weights, v_weights, q_weights, k_weights = self._weights()
        of_all = self._project_parts(x, v_weights, k_weights)
        of_rows = self._project_parts(gather_rows(of_all.x, index, inverse), u_weights, q_weights)
        u, q = of_rows.parts if u_only else map(F.silu, of_rows.parts)
        if u_only and not self.silu_in_gate:
            u = F.silu(u)
        q = gather_rows(q.unflatten(1, (layer.num_heads, -1)), inverse, index)
        k, v = self._keys_values(of_all.parts)
        # The buffer holds gradients of the projection itself, so it cannot be used after an activation.
        buffers = (of_all.grad_buffer, of_rows.grad_buffer) if u_only else (None, None)
        attended = gather_rows(attend(q, k, v, **_named(buffers[0])), index, inverse)
        return self.finish(of_rows.x, u, attended, scale, buffers[1])

    def keys_and_values(self, x: Tensor) -> KeysValues:
        """Computes `STULayer.keys_and_values`."""
        _, v_weights, _, k_weights = self._weights()
        return self._keys_values(self._project_parts(x, v_weights, k_weights).parts)

    def finish(
        self,
        x: Tensor,
        u: Tensor,
        attended: Tensor,
        scale: Tensor | None = None,
        grad_buffer: GradientBuffer | None = None,
    ) -> Tensor:
        """Computes `STULayer.finish`; backward writes the gradient of u into `grad_buffer`, if given."""
        layer, attended = self.layer, attended.flatten(1)
        if "gated" in layer.recomputed():
            branch = checkpoint(
                self._gate_and_project,
                u,
                attended,
                grad_buffer,
                use_reentrant=False,
                preserve_rng_state=layer.training and layer.dropout.p > 0,
            )
        else:
            branch = self._gate_and_project(u, attended, grad_buffer)
        if scale is not None:
            branch = (scale * branch).to(x.dtype)
        return x + branch

    def _attend(self, projected: Projected, attend: Attend, scale: Tensor | None) -> Tensor:
        """Runs attention and the second half of the layer."""
        u, q, k, v, x, grad_buffer = projected
        return self.finish(x, u, attend(q, k, v, **_named(grad_buffer)), scale, grad_buffer)

    def _gate_and_project(self, u: Tensor, attended: Tensor, grad_buffer: GradientBuffer | None) -> Tensor:
        return self.layer.output(self._gate(u, attended, grad_buffer))

    def _gate(self, u: Tensor, attended: Tensor, grad_buffer: GradientBuffer | None) -> Tensor:
        layer = self.layer
        return gated_norm(
            attended.to(u.dtype),
            u,
            layer.norm.weight,
            layer.norm.bias,
            num_groups=1 if layer.config.norm == "layer" else layer.num_heads,
            eps=layer.norm.eps,
            gate=layer.config.gate,
            dropout=layer.dropout.p if layer.training else 0.0,
            silu=layer.config.activation == "u" and self.silu_in_gate,
            grad_buffer=grad_buffer,
        )

    def _heads(
        self, x: Tensor, parts: Sequence[Tensor], grad_buffer: GradientBuffer | None = None
    ) -> Projected:
        u, v, q, k = parts
        heads = [part.unflatten(1, (self.layer.num_heads, -1)) for part in (q, k, v)]
        return Projected(u, *heads, x, grad_buffer)

    def _keys_values(self, parts: Sequence[Tensor]) -> KeysValues:
        v, k = map(F.silu, parts) if self.layer.config.activation == "uvqk" else parts
        heads = (self.layer.num_heads, -1)
        return KeysValues(k.unflatten(1, heads), v.unflatten(1, heads))

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        """Returns weight and bias of u, v, q and k."""
        layer = self.layer
        weights, biases = (joined.split(layer.widths) for joined in (layer.uvqk.weight, layer.uvqk.bias))
        return list(zip(weights, biases, strict=True))

    def _project_parts(self, x: Tensor, *chosen: tuple[Tensor, Tensor]) -> NormLinear:
        """Computes those of u, v, q and k whose weights and biases are given, before their activation."""
        norm = self.layer.input_norm
        return norm_linear(
            x,
            norm.weight,
            norm.bias,
            torch.cat([weight for weight, _ in chosen]),
            torch.cat([bias for _, bias in chosen]),
            [len(bias) for _, bias in chosen],
            eps=norm.eps,
            dtype=product_dtype(x),
        )


class EagerPath(Path):
    """Runs norm, projection and SiLU by PyTorch's operations, on any device and in traced graphs."""

    silu_in_gate = False

    def forward(self, x: Tensor, attend: Attend, scale: Tensor | None) -> Tensor:
        if "uvqk" not in self.layer.recomputed():
            return self._attend(self.project(x), attend, scale)
        joined = self._join(x)
        with rebuilt_in_backward(partial(self._rebuild, x.detach()), x.device.type) as watch:
            watch([joined])
            parts = self.split(joined)
            watch([joined, *parts])
            return self._attend(self._heads(x, parts), attend, scale)

    def project(self, x: Tensor) -> Projected:
        if self.layer.compiled and x.shape[0] > 1 and not torch.compiler.is_compiling():
            return self._heads(x, _compiled_front()(self.layer, x))
        return self._heads(x, self.split(self._join(x)))

    def split(self, joined: Tensor) -> list[Tensor]:
        """Splits the projection into u, v, q and k after their activation, each [T, H * its head width]."""
        if self.layer.config.activation == "uvqk":
            return list(F.silu(joined).split(self.layer.widths, dim=1))
        u, v, q, k = joined.split(self.layer.widths, dim=1)
        return [F.silu(u), v, q, k]

    def join(self, x: Tensor) -> Tensor:
        """Computes u, v, q and k before their activation, side by side."""
        return self.layer.uvqk(self.layer.input_norm(x))

    def _join(self, x: Tensor) -> Tensor:
        if "normed_x" in self.layer.recomputed():
            return checkpoint(self.join, x, use_reentrant=False, preserve_rng_state=False)
        return self.join(x)

    def _rebuild(self, x: Tensor) -> list[Tensor]:
        """Computes again all tensors that `forward` watches, in their order."""
        joined = self.join(x)
        return [joined, *self.split(joined)]


class FusedPath(Path):
    """Runs norm and projection as one op, and SiLU of u inside the gate.

    The ops' backward passes write the gradients of u, v, q and k side by side into a `GradientBuffer`.
    """

    silu_in_gate = True

    def forward(self, x: Tensor, attend: Attend, scale: Tensor | None) -> Tensor:
        if "uvqk" not in self.layer.recomputed():
            return self._attend(self.project(x), attend, scale)
        with rebuilt_in_backward(partial(self._rebuild, x.detach()), x.device.type) as watch:
            return self._attend(self.project(x, watch), attend, scale)

    def project(self, x: Tensor, watch: Watch | None = None) -> Projected:
        """Computes u, v, q and k; with activation "u", u is returned before SiLU.

        Args:
            watch: registers the tensors that backward computes again; see `rebuilt_in_backward`.
        """
        layer = self.layer
        all_silu = layer.config.activation == "uvqk"
        # A watched projection and its activation are separate tensors, so the op must not do both.
        silu_after = all_silu and watch is not None
        parts, x, grad_buffer = norm_linear(
            x,
            layer.input_norm.weight,
            layer.input_norm.bias,
            layer.uvqk.weight,
            layer.uvqk.bias,
            [sum(layer.widths)] if silu_after else layer.widths,
            eps=layer.input_norm.eps,
            dtype=product_dtype(x),
            keep_normed="normed_x" not in layer.recomputed(),
            silu=all_silu and not silu_after,
        )
        if watch is not None:
            joined = parts[0]
            watch([joined])
            if silu_after:
                parts, grad_buffer = F.silu(joined).split(layer.widths, dim=1), None
                watch([joined, parts[0]])
        return self._heads(x, parts, grad_buffer)

    def finish(
        self,
        x: Tensor,
        u: Tensor,
        attended: Tensor,
        scale: Tensor | None = None,
        grad_buffer: GradientBuffer | None = None,
    ) -> Tensor:
        """Computes `STULayer.finish`; backward sums the weight gradient in float32, like the node."""
        layer = self.layer
        if scale is not None or "gated" in layer.recomputed() or not torch.is_grad_enabled():
            return super().finish(x, u, attended, scale, grad_buffer)
        linear_add = triton_support.load(stu_node.LINEAR).LinearAdd
        gated = self._gate(u, attended.flatten(1), grad_buffer)
        return linear_add.apply(x, gated, layer.output.weight, layer.output.bias)

    def _rebuild(self, x: Tensor) -> list[Tensor]:
        """Computes again all tensors that `project` watches, in their order."""
        watched: list[Tensor] = []
        self.project(x, lambda tensors: watched.extend(tensors[len(watched) :]))
        return watched


def _named(grad_buffer: GradientBuffer | None) -> dict[str, GradientBuffer]:
    return {} if grad_buffer is None else {"grad_buffer": grad_buffer}


@lru_cache(maxsize=1)
def _compiled_front() -> Callable[[Any, Tensor], list[Tensor]]:
    """Returns the compiled `_front`, one graph for all layers of equal config and all numbers of tokens."""
    return torch.compile(_front, dynamic=True)


def _front(layer: Any, x: Tensor) -> list[Tensor]:
    """Computes u, v, q and k after their activation, each [T, H * its head width]."""
    path = EagerPath(layer)
    return path.split(path.join(x))
