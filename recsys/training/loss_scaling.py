"""Scales the loss of FP16 training, so that small gradients do not vanish in float16 (arXiv 1710.03740).

torch's `GradScaler` chooses the scale: it halves it when a gradient overflows, which skips the step, and
doubles it after 2,000 steps without an overflow. Sharded tables are updated inside the backward pass, before
the optimizer could divide their gradients. So the gradients of looked-up rows are divided where they leave
the model, in float32, and FBGEMM sees them as they are without a scale. A rank whose gradients of rows are
not finite sends zeros instead, which leave a table and its optimizer state as they are, except for the decay
of Adam's moments.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from recsys.errors import NonFiniteLossError

MAX_SKIPPED = 25
"""Skipped steps in a row after which a run ends. The scale has then fallen from 65,536 to 0.002."""

log = logging.getLogger(__name__)


class LossScaler:
    """Scales losses, divides gradients and skips steps whose gradients are not finite.

    Args:
        device: the device of the run.

    Attributes:
        skipped: steps skipped since the run began.
        skipped_in_a_row: steps skipped since the last that was not.
    """

    def __init__(self, device: torch.device):
        self._scaler = torch.amp.GradScaler(device.type)
        self._overflow = torch.zeros((), device=device)
        self._state = torch.zeros(4, dtype=torch.float64)
        self.skipped = 0
        self.skipped_in_a_row = 0

    def watch(self, loss: nn.Module) -> None:
        """Scales the loss that a module returns, as the first entry of a tuple."""

        def scale(_module: nn.Module, _arguments: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            return self._scaler.scale(output[0]), output[1]

        loss.register_forward_hook(scale)

    def dividing(self, sharded: Iterable[str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
        """Returns a function of looked-up vectors, by column, that leaves them as they are.

        In backward it divides the gradients of those from sharded tables.

        Args:
            sharded: the columns that read sharded tables.
        """
        columns = frozenset(sharded)

        def divide(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
            names = [name for name in vectors if name in columns]
            if not names or not torch.is_grad_enabled():
                return vectors
            # Scaling 1 makes the scaler create its scale, which it does at the first use.
            current = self._scaler.scale(torch.ones((), device=self._overflow.device))
            divided = _Divide.apply(current, self._overflow, *(vectors[name] for name in names))
            return vectors | dict(zip(names, divided, strict=True))

        return divide

    def unscale(self, optimizer: KeyedOptimizer, gradients: list[Tensor]) -> None:
        """Divides the gradients of an optimizer in place. Collective if there are several ranks.

        They are not finite afterwards if the gradients of looked-up rows were not, on any rank.
        """
        if gradients:
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(self._overflow, dist.ReduceOp.MAX)
            gradients[0].add_(torch.where(self._overflow > 0, torch.inf, 0.0))
            self._overflow.zero_()
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: KeyedOptimizer, number: int) -> bool:
        """Updates weights unless a gradient is not finite, then adapts the scale.

        Args:
            optimizer: its gradients are divided.
            number: number of the step, for messages.

        Returns:
            Whether weights were updated.

        Raises:
            NonFiniteLossError: `MAX_SKIPPED` steps in a row were skipped; on all ranks.
        """
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        now = self._scaler.get_scale()
        if now >= before:
            self.skipped_in_a_row = 0
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        log.warning(
            "step %d: gradients overflow float16 at a loss scale of %g, so the step is skipped (%d skipped "
            "so far); the next scale is %g",
            number,
            before,
            self.skipped,
            now,
        )
        if self.skipped_in_a_row == MAX_SKIPPED:
            raise NonFiniteLossError(
                f"step {number}: gradients overflowed float16 in {MAX_SKIPPED} steps in a row, at loss "
                f"scales down to {before:g}; use model.precision: BF16 or FP32, or a smaller learning rate"
            )
        return False

    def tensor(self) -> Tensor:
        """Returns the state for checkpoints, float64 [4]. To restore it, load into it and call `restore`."""
        state = self._scaler.state_dict()
        numbers = (state["scale"], state["_growth_tracker"], self.skipped, self.skipped_in_a_row)
        return self._state.copy_(torch.tensor(numbers, dtype=torch.float64))

    def restore(self) -> None:
        """Continues from the numbers in the tensor that `tensor` returned."""
        scale, growth, skipped, in_a_row = self._state.tolist()
        state = self._scaler.state_dict()
        self._scaler.load_state_dict(state | {"scale": scale, "_growth_tracker": int(growth)})
        self.skipped, self.skipped_in_a_row = int(skipped), int(in_a_row)


class _Divide(torch.autograd.Function):
    """Returns its vectors; in backward, divides their gradients by a scale, or zeroes them if not finite."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, overflow: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.scale, ctx.overflow = scale, overflow
        return tuple(vector.view_as(vector) for vector in vectors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
        ctx.overflow.add_(~finite)
        inverse = ctx.scale.reciprocal()
        return None, None, *(torch.where(finite, gradient * inverse, 0.0) for gradient in gradients)
