"""CUDA graphs of one training step: forward, backward, and the update of the weights.

Autograd sees a replay as one node. Its backward hands the gradients of parameters over as they lie in the
graph's memory, without a node for each parameter.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recsys.models.base import Losses

WARM_UPS = 3
"""Runs before a recording, in which libraries choose algorithms and allocate what they keep."""


class StepGraph:
    """The recorded forward and backward pass for inputs of one size.

    Args:
        compute: computes the losses from buffers that stay where they are.
        vectors: buffers among these inputs that need gradients.
        parameters: the parameters that `compute` uses.
        pool: memory that graphs share: never are two of them between forward and backward.

    Raises:
        RuntimeError: the step does what cannot be recorded.
    """

    def __init__(
        self,
        compute: Callable[[], Losses],
        vectors: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        pool: Any,
    ) -> None:
        inputs = [*vectors, *parameters]
        _warm_up(compute, inputs)
        self._parameters, self._num_vectors, self._pool = list(parameters), len(vectors), pool
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward, pool=pool):
            losses = compute()
        self._sums, self._counts = losses.sums, losses.counts
        self._grad_sums = torch.empty_like(self._sums)
        with torch.cuda.graph(self._backward, pool=pool):
            self._gradients = torch.autograd.grad(self._sums, inputs, self._grad_sums, allow_unused=True)
        # Autograd differentiates a function only if one of its inputs requires gradients.
        self._anchor = torch.zeros((), device=self._sums.device, requires_grad=True)
        self._update: torch.cuda.CUDAGraph | None = None
        self._updated: Any = None

    def __call__(self, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Replays the forward pass; `vectors` are the buffers, with the gradients that they pass on.

        Returns:
            Sums and counts of the losses. The backward pass of the sums is a replay, too, and overwrites the
            gradients of the parameters.
        """
        return _Replay.apply(self, self._anchor, *vectors)

    def update(self, function: Callable[[], Tensor]) -> Tensor:
        """Replays `function`, which updates the weights from their gradients; records it in the first call.

        Call it after the backward pass.

        Returns:
            The result of `function`, in memory that the next replay overwrites.

        Raises:
            RuntimeError: the function does what cannot be recorded. It has changed nothing.
        """
        if self._update is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._updated = function()
            self._update = graph
        self._update.replay()
        return self._updated

    def _replay_backward(self, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        self._grad_sums.copy_(grad_sums)
        self._backward.replay()
        count = self._num_vectors
        for parameter, gradient in zip(self._parameters, self._gradients[count:], strict=True):
            parameter.grad = gradient
        return self._gradients[:count]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: StepGraph, anchor: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.graph = graph
        graph._forward.replay()
        counts = graph._counts.detach()
        ctx.mark_non_differentiable(counts)
        return graph._sums.detach(), counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sums: Tensor, _grad_counts: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graph._replay_backward(grad_sums)


def _warm_up(compute: Callable[[], Losses], inputs: Sequence[Tensor]) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(WARM_UPS):
            torch.autograd.grad(compute().sums.sum(), inputs, allow_unused=True)
    torch.cuda.synchronize()
