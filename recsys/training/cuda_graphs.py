"""CUDA graphs of a forward pass, and of one training step: forward, backward, and the update of the weights.

Autograd sees a replay as one node. Its backward hands the gradients of parameters over as they lie in the
graph's memory, without a node for each parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recsys.scoring.recorded import recording
from recsys.training.totals import Totals

WARM_UPS = 3
"""Runs before a recording, in which libraries choose algorithms and allocate what they keep."""

Result = TypeVar("Result")


class GraphMemory:
    """Memory that graphs share: at no time are two of them at work, or between forward and backward."""

    @cached_property
    def pool(self) -> Any:
        """The pool that graphs are recorded with."""
        return torch.cuda.graph_pool_handle()


class ForwardGraph(Generic[Result]):
    """The recorded forward pass for inputs of one size.

    Args:
        compute: computes the result from buffers that stay where they are. It has run before, so that
            libraries have chosen algorithms and allocated what they keep.
        vectors: buffers among these inputs; a replay copies vectors to their front.
        pool: memory that graphs share, see `GraphMemory`.

    Raises:
        RuntimeError: the forward pass does what cannot be recorded.
    """

    def __init__(self, compute: Callable[[], Result], vectors: Sequence[Tensor], pool: Any) -> None:
        self._vectors, self._pool, self._forward = list(vectors), pool, torch.cuda.CUDAGraph()
        with recording(self._forward, pool):
            self._result = compute()

    def __call__(self, *vectors: Tensor) -> Result:
        """Replays the forward pass with looked-up vectors, for each buffer [n, width].

        Returns:
            The result, in memory that the next replay overwrites.
        """
        self._replay_forward(vectors)
        return self._result

    def _replay_forward(self, vectors: Sequence[Tensor]) -> None:
        for buffer, rows in zip(self._vectors, vectors, strict=True):
            buffer[: len(rows)].copy_(rows)
        self._forward.replay()


class StepGraph(ForwardGraph[Totals]):
    """The recorded forward and backward pass for inputs of one size.

    Args:
        compute, vectors, pool: as for `ForwardGraph`, with the loss of the totals; the vectors get gradients.
        parameters: the parameters that `compute` uses.

    Raises:
        RuntimeError: the step does what cannot be recorded.
    """

    def __init__(
        self,
        compute: Callable[[], Totals],
        vectors: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        pool: Any,
    ) -> None:
        inputs = [*vectors, *parameters]
        _warm_up(compute, inputs)
        super().__init__(compute, vectors, pool)
        self._parameters, self._backward = list(parameters), torch.cuda.CUDAGraph()
        totals = self._result
        self._result = replace(totals, losses=totals.losses.detach(), loss=totals.loss.detach())
        self._grad_loss = torch.empty_like(totals.loss)
        with recording(self._backward, pool):
            self._gradients = torch.autograd.grad(totals.loss, inputs, self._grad_loss, allow_unused=True)
        # Autograd differentiates a function only if one of its inputs requires gradients.
        self._anchor = torch.zeros((), device=totals.loss.device, requires_grad=True)
        self._update: torch.cuda.CUDAGraph | None = None
        self._updated: Any = None

    def __call__(self, *vectors: Tensor) -> Totals:
        """Replays the forward pass with looked-up vectors, for each buffer [n, width], which get gradients.

        Returns:
            The totals, in memory that the next replay overwrites. The backward pass of their loss is a
            replay, too, and overwrites the gradients of the parameters.
        """
        return replace(self._result, loss=_Replay.apply(self, self._anchor, *vectors))

    @property
    def updates(self) -> bool:
        """Whether the update is recorded; the backward pass then leaves the gradients in the graph."""
        return self._update is not None

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
            with recording(graph, self._pool):
                self._updated = function()
            self._update = graph
        self._update.replay()
        return self._updated

    def _replay_backward(self, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        self._grad_loss.copy_(grad_loss)
        self._backward.replay()
        count = len(self._vectors)
        if not self.updates:
            for parameter, gradient in zip(self._parameters, self._gradients[count:], strict=True):
                parameter.grad = gradient
        return self._gradients[:count]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: StepGraph, anchor: Tensor, *vectors: Tensor) -> Tensor:
        ctx.graph, ctx.counts = graph, list(map(len, vectors))
        graph._replay_forward(vectors)
        return graph._result.loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = zip(ctx.graph._replay_backward(grad_loss), ctx.counts, strict=True)
        return None, None, *(None if grad is None else grad[:count] for grad, count in gradients)


def _warm_up(compute: Callable[[], Totals], inputs: Sequence[Tensor]) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(WARM_UPS):
            torch.autograd.grad(compute().loss, inputs, allow_unused=True)
    torch.cuda.synchronize()
