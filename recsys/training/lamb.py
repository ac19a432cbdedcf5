"""LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2): AdamW with steps as long as the weights' norm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class LambOptimizer(torch.optim.Optimizer):
    """Updates each parameter w as w <- w - lr x (|w| / |r|) x r.

    Here r = m / (sqrt(v) + eps) + weight_decay x w, with m and v as in AdamW. The factor |w| / |r| is 1 where
    either norm is 0.

    Each operation covers all parameters of a group at once, and nothing leaves their device.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the mean gradient and of the mean squared gradient.
        eps: added to the root of the second moment.
        weight_decay: this times the weight is added to the step before the step's norm is taken.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._move(weights, group)

    def _move(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state_of(weight) for weight in weights]
        gradients = [weight.grad for weight in weights]
        steps, means, squares = (
            [state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        # Bias correction: a moment that starts at 0 is too small by the factor 1 - beta ^ step.
        moves = torch._foreach_div(squares, _shares(beta2, steps))
        torch._foreach_sqrt_(moves)
        torch._foreach_add_(moves, group["eps"])
        torch._foreach_mul_(moves, _shares(beta1, steps))
        moves = torch._foreach_div(means, moves)
        if group["weight_decay"]:
            torch._foreach_add_(moves, weights, alpha=group["weight_decay"])
        lengths, of_moves = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, moves))
        ratios = torch.where((lengths > 0) & (of_moves > 0), lengths / of_moves, 1.0) * group["lr"]
        torch._foreach_mul_(moves, list(ratios.unbind()))
        torch._foreach_sub_(weights, moves)

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state


def _shares(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """Returns 1 - beta ^ step for each of `steps`."""
    shares = torch._foreach_pow(beta, steps)
    torch._foreach_neg_(shares)
    torch._foreach_add_(shares, 1.0)
    return list(shares)
